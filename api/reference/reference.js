// Reads openapi.json and shows it. Every text of it is put in as text, never as markup.
const METHODS = ["get", "post", "put", "patch", "delete"];

function element(name, content = [], attributes = {}) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...[content].flat());
  return made;
}

/** The text with what stands between backticks as code. */
function prose(text = "") {
  return text.split("`").map((part, at) => (at % 2 ? element("code", part) : part));
}

function typeName(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf ?? schema.oneOf) return (schema.anyOf ?? schema.oneOf).map(typeName).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeName(schema.items)}`;
  return [schema.type].flat().join(" or ") || "anything";
}

function table(head, rows) {
  const cells = (kind, row) => element("tr", row.map((cell) => element(kind, cell, kind === "th" ? { scope: "col" } : {})));
  return element("table", [element("thead", cells("th", head)), element("tbody", rows.map((row) => cells("td", row)))]);
}

function schemaView(schema, schemas, seen = []) {
  const name = schema.$ref?.split("/").pop();
  const full = name ? schemas[name] : schema;
  if (full.contentSchema?.items) return eventsView(full.contentSchema.items.oneOf, schemas);
  if (full.oneOf) return element("div", full.oneOf.flatMap((one) => [element("p", prose(schemas[typeName(one)]?.description)), schemaView(one, schemas, seen)]));
  const rows = Object.entries(full.properties ?? {}).map(([key, value]) => {
    const needed = full.required?.includes(key) ? "" : "optional";
    const inner = [value, ...(value.anyOf ?? []), value.items ?? {}].find((part) => part.$ref);
    const next = inner?.$ref.split("/").pop();
    const more = next && !seen.includes(next) && schemas[next].properties ? [nested(inner, schemas, [...seen, next])] : [];
    return [element("code", key), [element("code", typeName(value)), " ", element("span", needed, { class: "dim" })], [...prose(value.description), ...more]];
  });
  return rows.length ? table(["Field", "Type", "What it is"], rows) : element("p", element("code", typeName(full)));
}

function nested(reference, schemas, seen) {
  const holder = element("details", element("summary", reference.$ref.split("/").pop()));
  holder.addEventListener("toggle", () => {
    if (holder.children.length === 1) holder.append(element("div", schemaView(reference, schemas, seen)));
  });
  return holder;
}

/** The messages of a stream, each with its payload. */
function eventsView(messages, schemas) {
  const rows = messages.map(({ properties: { event, data } }) => {
    const payload = data.contentSchema;
    return [element("code", event.const), [...prose(schemas[typeName(payload)].description), nested(payload, schemas, [typeName(payload)])]];
  });
  return table(["Event", "Its data, as JSON"], rows);
}

function contentView(content, schemas) {
  return Object.entries(content ?? {}).flatMap(([type, media]) => [
    element("p", element("code", type), { class: "dim" }),
    media.schema ? schemaView(media.schema, schemas) : "",
  ]);
}

function operationView(path, method, operation, schemas) {
  const scope = operation.security?.[0]?.token?.[0];
  const body = [
    element("p", prose(operation.description)),
    element("p", scope ? ["Needs a token of scope ", element("code", scope), "."] : "Needs no token.", { class: "dim" }),
  ];
  if (operation.parameters?.length) {
    const rows = operation.parameters.map((parameter) => [
      element("code", parameter.name),
      [element("code", typeName(parameter.schema)), element("span", ` in ${parameter.in}${parameter.required ? "" : ", optional"}`, { class: "dim" })],
      prose(parameter.description),
    ]);
    body.push(element("h3", "Parameters"), table(["Name", "Type", "What it is"], rows));
  }
  if (operation.requestBody) body.push(element("h3", "Body"), ...contentView(operation.requestBody.content, schemas));
  body.push(element("h3", "Answers"));
  for (const [code, response] of Object.entries(operation.responses)) {
    const view = element("details", element("summary", [`${code}: `, ...prose(response.description)]));
    view.addEventListener("toggle", () => {
      if (view.children.length === 1) view.append(element("div", contentView(response.content, schemas)));
    });
    body.push(view);
  }
  const holder = element("details", [
    element("summary", [element("code", method.toUpperCase(), { class: "method" }), element("code", path), " ", element("span", operation.summary, { class: "says" })]),
    element("div", body),
  ], { id: operation.operationId });
  holder.dataset.text = `${method} ${path} ${operation.summary} ${operation.description ?? ""}`.toLowerCase();
  return holder;
}

function show(api) {
  const schemas = api.components?.schemas ?? {};
  document.querySelector("#about").textContent = `${api.info.summary} Version ${api.info.version}.`;
  const tags = new Map();
  for (const [path, item] of Object.entries(api.paths)) {
    for (const method of METHODS.filter((name) => item[name])) {
      const tag = item[method].tags?.[0] ?? "other";
      if (!tags.has(tag)) tags.set(tag, element("section", element("h2", tag)));
      tags.get(tag).append(operationView(path, method, item[method], schemas));
    }
  }
  document.querySelector("#operations").replaceChildren(...tags.values());
}

function find(words) {
  let count = 0;
  for (const section of document.querySelectorAll("section")) {
    let any = false;
    for (const holder of section.querySelectorAll(":scope > details")) {
      holder.hidden = !words.every((word) => holder.dataset.text.includes(word));
      any ||= !holder.hidden;
      count += !holder.hidden;
    }
    section.hidden = !any;
  }
  document.querySelector("#found").textContent = words.length ? `${count} found` : "";
}

const input = document.querySelector("#find");
input.addEventListener("input", () => find(input.value.toLowerCase().split(/\s+/).filter(Boolean)));
try {
  show(await (await fetch("openapi.json")).json());
  document.getElementById(decodeURIComponent(location.hash.slice(1)))?.setAttribute("open", "");
} catch (error) {
  document.querySelector("#operations").replaceChildren(element("p", `openapi.json cannot be read: ${error.message}`, { role: "alert" }));
}
