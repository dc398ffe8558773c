/* The pipeline as a picture: the stages of the run's flow, how much waits before each, and where each stage's time goes.
 *
 *    gate ─(queue)▶ rollout ─(queue)▶ reward ─(queue)▶ advantage ─(queue)▶ update      any flow that the service gives:
 *      ▲               ▲     └─(queue)▶ reference ─────────────────────────┘  │        a column of boxes for each layer
 *      └───────────────┴────────── weight sync ◀─────────────────────────────┘
 *
 * Drawn across where there is room, and downwards on a phone.
 */

import { element, say, svg } from "./element.js";
import { count, number, percent, seconds } from "./format.js";
import { SHARES, WORDS } from "./progress.js";

const WIDE = 700; // px from which it is drawn across
const BAR = 10;
const GAP = 8; // px between two texts on a line

// Until the service has given the flow of the run.
const USUAL = {
  stages: ["source", "rollout", "reward", "advantage", "update"].map((name, layer) => ({ name, layer })),
  edges: [["source", "rollout"], ["rollout", "reward"], ["reward", "advantage"], ["advantage", "update"]].map(([from, to]) => ({ from, to, direct: true })),
};

/** Narrow a text that is longer than `room`, so that it stays in its box. */
function fit(text, room) {
  text.removeAttribute("textLength");
  if (text.getComputedTextLength() <= room) return;
  text.setAttribute("textLength", Math.max(1, room));
  text.setAttribute("lengthAdjust", "spacingAndGlyphs");
}

const shown = (name) => (name === "source" ? "gate" : name);

/** Stages by layer, and the edges to draw; a stage's queue stands on the first edge into it. */
function parts(flow) {
  const layers = [];
  for (const { name, layer } of flow.stages) (layers[layer] ??= []).push(shown(name));
  const known = new Set();
  const edges = flow.edges
    .filter((edge) => edge.direct)
    .map(({ from, to }) => ({ from: shown(from), to, queue: known.has(to) ? null : (known.add(to), to) }));
  return { layers: layers.filter(Boolean), edges };
}

function across(flow) {
  const { layers, edges: wanted } = parts(flow);
  const gap = 53;
  const height = 96;
  const wide = Math.max(110, (1000 - 117 - gap * (layers.length - 1)) / Math.max(1, layers.length - 1));
  const tallest = Math.max(...layers.map((names) => names.length));
  const nodes = {};
  layers.forEach((names, layer) =>
    names.forEach((name, row) => {
      const x = layer ? 1 + 115 + gap + (layer - 1) * (wide + gap) : 1;
      const between = layer > 1 && layer < layers.length - 1; // at the top: edges that skip a layer pass below
      nodes[name] = { x, y: (row + (between ? 0 : (tallest - names.length) / 2)) * (height + 16), w: layer ? wide : 115, h: height };
    }),
  );
  const floor = tallest * (height + 16) + 22;
  const { update, rollout, gate } = nodes;
  const edges = wanted.map(({ from, to, queue }) => {
    const [a, b] = [nodes[from].x + nodes[from].w, nodes[from].y + height / 2];
    const [c, d] = [nodes[to].x, nodes[to].y + height / 2];
    const turn = (a + c) / 2;
    const path = b === d ? `M${a} ${b}H${c - 5}` : `M${a} ${b}C${turn} ${b} ${turn} ${d} ${c - 5} ${d}`;
    return { path, queue, head: [c, d, "right"], pill: [c - gap / 2, d] };
  });
  const right = update.x + update.w;
  if (rollout) {
    const up = rollout.x + rollout.w / 2;
    const from = rollout.x + rollout.w + gap;
    nodes.sync = { x: from, y: floor, w: Math.max(180, update.x - gap - from), h: 52 };
    const { sync } = nodes;
    const line = sync.y + sync.h / 2;
    const down = update.x + update.w / 2;
    const open = gate.x + gate.w / 2;
    edges.push({ path: `M${down} ${update.y + update.h}V${line - 10}Q${down} ${line} ${down - 10} ${line}H${sync.x + sync.w + 5}`, head: [sync.x + sync.w, line, "left"], weights: true });
    edges.push({ path: `M${sync.x} ${line}H${up + 10}Q${up} ${line} ${up} ${line - 10}V${rollout.y + rollout.h + 5}`, head: [up, rollout.y + rollout.h, "up"], weights: true });
    edges.push({ path: `M${up + 10} ${line}H${open + 10}Q${open} ${line} ${open} ${line - 10}V${gate.y + gate.h + 5}`, head: [open, gate.y + gate.h, "up"], weights: true, words: ["opens the gate", (open + up) / 2, line - 7] });
  }
  return { width: Math.max(1000, right + 1), height: floor + 53, nodes, edges, small: false };
}

function downwards(flow) {
  const { layers, edges: wanted } = parts(flow);
  const [tall, gap, inset, right] = [62, 34, 22, 337];
  const nodes = {};
  layers.forEach((names, layer) => {
    const w = (right - 11 * (names.length - 1)) / names.length;
    names.forEach((name, at) => {
      nodes[name] = { x: inset + at * (w + 11), y: 1 + layer * (tall + gap), w, h: tall };
    });
  });
  const edges = wanted.map(({ from, to, queue }) => {
    const column = nodes[from].w < nodes[to].w ? nodes[from] : nodes[to];
    const [x, y, end] = [column.x + 44, nodes[from].y + tall, nodes[to].y];
    return { path: `M${x} ${y}V${end - 5}`, head: [x, end, "down"], pill: [x + 34, end - gap / 2], queue };
  });
  if (nodes.rollout) {
    nodes.sync = { x: inset, y: 1 + layers.length * (tall + gap), w: right, h: tall };
    const x = nodes.update.x + 44;
    edges.push({ path: `M${x} ${nodes.update.y + tall}V${nodes.sync.y - 5}`, head: [x, nodes.sync.y, "down"], weights: true });
    const [low, high, first] = [nodes.sync, nodes.rollout, nodes.gate].map((node) => node.y + tall / 2);
    edges.push({ path: `M${inset} ${low}H16Q8 ${low} 8 ${low - 8}V${high + 8}Q8 ${high} 16 ${high}H${inset - 5}`, head: [inset, high, "right"], weights: true });
    edges.push({ path: `M8 ${high + 8}V${first + 8}Q8 ${first} 16 ${first}H${inset - 5}`, head: [inset, first, "right"], weights: true });
  }
  const last = nodes.sync ?? nodes.update;
  return { width: 360, height: last.y + tall + 1, nodes, edges, small: true };
}

const HEADS = {
  right: (x, y) => `M${x} ${y}l-7 -4v8z`,
  left: (x, y) => `M${x} ${y}l7 -4v8z`,
  up: (x, y) => `M${x} ${y}l-4 7h8z`,
  down: (x, y) => `M${x} ${y}l-4 -7h8z`,
};

/** Fills that differ by their texture too, so that they can be distinguished without colours. */
function patterns() {
  const pattern = (name, width, ...marks) =>
    svg("pattern", { id: `fill-${name}`, width, height: width, patternUnits: "userSpaceOnUse" }, svg("rect", { class: `share-${name}`, width, height: width }), marks);
  return svg(
    "defs",
    {},
    pattern("waiting_input", 6, svg("path", { class: "mark", d: "M-1 7L7 -1M-1 1L1 -1M5 7L7 5" })),
    pattern("waiting_room", 5, svg("circle", { class: "spot", cx: 2.5, cy: 2.5, r: 1.1 })),
  );
}

const FILLS = { busy: "share-busy", waiting_input: "pattern-waiting_input", waiting_room: "pattern-waiting_room", other: "share-other" };

export class Picture {
  constructor() {
    this.described = element("p", { class: "hidden", id: "picture-says" });
    this.drawing = svg("svg", { class: "picture", role: "img", "aria-labelledby": "picture-title", "aria-describedby": "picture-says" });
    const legend = SHARES.map((name) => element("span", { class: "key" }, element("i", { class: `swatch share-${name}` }), WORDS[name]));
    this.element = element(
      "section",
      { class: "card pipeline", "aria-labelledby": "picture-title" },
      element("div", { class: "card-head" }, element("h2", { id: "picture-title" }, "Pipeline"), element("div", { class: "keys" }, legend)),
      this.drawing,
      this.described,
    );
    this.shape = "";
    this.sizes = new ResizeObserver(() => this.progress && this.update(this.progress));
    this.sizes.observe(this.element);
  }

  destroy() {
    this.sizes.disconnect();
  }

  update(progress) {
    this.progress = progress;
    const stages = progress.stages;
    const flow = progress.flow?.stages ? progress.flow : USUAL;
    const wide = this.element.clientWidth >= WIDE;
    const shape = `${wide ? "across" : "down"} ${JSON.stringify(flow.edges)}`;
    if (shape !== this.shape) this.build(shape, wide ? across(flow) : downwards(flow));
    const slowest = progress.state === "running" ? progress.slowest : null;
    for (const [name, parts] of this.parts) this.stage(name, parts, stages.get(name), slowest?.name === name);
    for (const [name, pill] of this.pills) {
      const queue = stages.get(name)?.queue;
      say(pill.text, queue === undefined ? "–" : count(queue));
      pill.node.setAttribute("class", queue ? "pill full" : "pill");
    }
    const moving = progress.state === "running";
    for (const [edge, queue] of this.flows) {
      const goes = moving && (queue ? (stages.get(queue)?.rows ?? 0) > 0 : progress.published);
      edge.classList.toggle("flowing", Boolean(goes));
    }
    this.gate(progress);
    this.sync(progress);
    say(this.described, describe(stages, progress));
  }

  stage(name, parts, stage, slowest) {
    parts.node.classList.toggle("absent", !stage);
    parts.node.classList.toggle("slowest", slowest);
    const shares = stage?.shares;
    let x = parts.from;
    for (const what of SHARES) {
      const wide = (shares?.[what] ?? 0) * parts.wide;
      parts.bars[what].setAttribute("x", x.toFixed(2));
      parts.bars[what].setAttribute("width", wide.toFixed(2));
      x += wide;
    }
    say(parts.many, stage && stage.workers.length > 1 ? `× ${stage.workers.length}` : "");
    say(parts.busy, stage ? `busy ${percent(shares.busy)}` : "not at work");
    if (parts.waits) say(parts.waits, stage ? `input ${percent(shares.waiting_input)}, room ${percent(shares.waiting_room)}` : "");
    say(parts.rate, stage ? `${stage.rows < 1000 ? number(stage.rows, 2) : count(stage.rows)} rows/s` : "");
    // On a phone the name, the number of workers and the rate are on one line, and the shares on another.
    const many = parts.small ? parts.many.getComputedTextLength() + GAP : 0;
    fit(parts.name, parts.wide - parts.rate.getComputedTextLength() - many - GAP);
    if (parts.small) parts.many.setAttribute("x", parts.from + parts.name.getComputedTextLength() + GAP);
    if (parts.waits) fit(parts.waits, parts.wide - (parts.small ? parts.busy.getComputedTextLength() + GAP : 0));
  }

  gate(progress) {
    const { gate, bound, published } = progress;
    say(this.gateText[0], bound === null ? "" : `staleness ≤ ${bound}`);
    say(this.gateText[1], gate ? `${count(gate.open)} groups in` : published ? `opened by v${published.version}` : "");
    for (const text of this.gateText) fit(text, this.gateRoom);
  }

  sync(progress) {
    if (!this.syncText) return;
    const { published, swapped } = progress;
    say(this.syncText[0], published ? `v${published.version} published${swapped ? `, v${swapped.version} in use` : ""}` : "nothing published yet");
    fit(this.syncText[0], this.syncRoom());
    say(this.syncText[1], swapped ? `${seconds(swapped.exposed_seconds)} exposed, ${seconds(swapped.hidden_seconds)} hidden` : "");
  }

  build(shape, layout) {
    this.shape = shape;
    this.parts = new Map();
    this.pills = new Map();
    this.flows = [];
    this.syncText = null;
    this.drawing.setAttribute("viewBox", `0 0 ${layout.width} ${layout.height}`);
    this.drawing.replaceChildren(patterns());
    for (const edge of layout.edges) {
      const line = svg("path", { class: edge.weights ? "edge weights" : "edge", d: edge.path });
      this.flows.push([line, edge.queue]);
      this.drawing.append(line, svg("path", { class: edge.weights ? "head weights" : "head", d: HEADS[edge.head[2]](edge.head[0], edge.head[1]) }));
      if (edge.words) this.drawing.append(svg("text", { class: "small", x: edge.words[1], y: edge.words[2], "text-anchor": "middle" }, edge.words[0]));
    }
    for (const edge of layout.edges) if (edge.queue) this.pill(edge, layout.small);
    for (const [name, box] of Object.entries(layout.nodes)) {
      const node = svg("g", { class: `node node-${name}` }, svg("rect", { class: "box", x: box.x, y: box.y, width: box.w, height: box.h, rx: 8 }));
      this.drawing.append(node);
      const text = (shown, x, y, kind, anchor = "start") => {
        const made = svg("text", { class: kind, x: box.x + x, y: box.y + y, "text-anchor": anchor }, shown);
        node.append(made);
        return made;
      };
      if (name === "gate") {
        text("gate", 12, layout.small ? 26 : 24, "name");
        this.gateRoom = box.w - 24;
        this.gateText = layout.small ? [text("", 12, 46, "small"), text("", box.w - 12, 26, "small", "end")] : [text("", 12, 50, "small"), text("", 12, 67, "small")];
      } else if (name === "sync") {
        const label = text("weight sync", 12, layout.small ? 26 : 22, "name");
        this.syncRoom = () => box.w - 24 - (layout.small ? 0 : label.getComputedTextLength() + GAP);
        this.syncText = [text("", layout.small ? 12 : box.w - 12, layout.small ? 46 : 22, "small", layout.small ? "start" : "end"), text("", layout.small ? box.w - 12 : 12, layout.small ? 26 : 40, "small", layout.small ? "end" : "start")];
      } else {
        this.parts.set(name, this.box(name, node, box, layout.small, text));
      }
    }
  }

  box(name, node, box, small, text) {
    const title = small ? [12, 20] : [12, 24];
    const from = box.x + 12;
    const wide = box.w - 24;
    const top = box.y + (small ? 30 : 36);
    const bars = Object.fromEntries(SHARES.map((what) => [what, svg("rect", { class: FILLS[what], y: top, height: BAR, width: 0 })]));
    node.append(svg("rect", { class: "trough", x: from, y: top, width: wide, height: BAR }), ...Object.values(bars));
    const label = text(name, ...title, "name");
    label.append(svg("title", {}, name));
    return {
      node,
      name: label,
      small,

      from,
      wide,
      bars,
      many: small ? text("", ...title, "small") : text("", box.w - 12, 66, "small", "end"),
      rate: text("", box.w - 12, title[1], "small", "end"),
      busy: text("", 12, small ? 54 : 66, "strong"),
      waits: !small ? text("", 12, 83, "small") : box.w > 200 ? text("", box.w - 12, 54, "small", "end") : null,
    };
  }

  pill(edge, small) {
    const [x, y] = edge.pill;
    const node = svg("g", { class: "pill" }, svg("title", {}, `rows that wait for ${edge.queue}`), svg("rect", { x: x - 19, y: y - 10, width: 38, height: 20, rx: 10 }));
    const text = svg("text", { class: "queue", x, y: y + 4, "text-anchor": "middle" });
    node.append(text);
    if (small) node.append(svg("text", { class: "small", x: x + 26, y: y + 4 }, "waiting"));
    this.drawing.append(node);
    this.pills.set(edge.queue, { node, text });
  }
}

function describe(stages, progress) {
  const parts = [...stages].map(
    ([name, stage]) =>
      `${name} ${percent(stage.shares.busy)} busy, ${percent(stage.shares.waiting_input)} waiting for input, ` +
      `${percent(stage.shares.waiting_room)} waiting for room, ${stage.queue} rows in its queue`,
  );
  if (!parts.length) return "No stage has reported yet.";
  if (progress.published) parts.push(`weights of version ${progress.published.version} are published`);
  return `${parts.join("; ")}.`;
}
