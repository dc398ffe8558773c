/* Makes elements. Text goes in as text nodes only: nothing on this page is ever parsed as HTML, so what a model wrote cannot become
 * part of it. The server forbids it besides (Content-Security-Policy: require-trusted-types-for 'script'). */

const SVG = "http://www.w3.org/2000/svg";

/** `attributes`: `on` is {event: listener}, `set` is {property: value}; true sets an empty attribute, null and false none. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, { on = {}, set = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const [event, listener] of Object.entries(on)) node.addEventListener(event, listener);
  Object.assign(node, set);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Change a text only when it is another one: a screen reader's place and a person's selection stay where they are. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

let spoken = 0;

/** Announce a text to screen readers at once. */
export function announce(text) {
  const region = document.getElementById("spoken");
  spoken += 1;
  region.textContent = spoken % 2 ? text : `${text}\u00a0`; // the same text twice is spoken twice
}

/** Draws at most once a frame and at most every `milliseconds`; a hidden page draws when it is seen again. */
export function paced(draw, milliseconds) {
  let due = 0;
  let timer = 0;
  const go = () => {
    timer = 0;
    due = performance.now() + milliseconds;
    draw();
  };
  const ask = () => {
    if (timer) return;
    timer = setTimeout(() => requestAnimationFrame(go), Math.max(0, due - performance.now()));
  };
  ask.stop = () => {
    clearTimeout(timer);
    timer = -1;
  };
  return ask;
}
