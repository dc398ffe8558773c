/* Questions that must be answered first. The dialog is the browser's own: it holds the focus, Escape means no, and the focus goes back
 * to where it was. */

import { element } from "./element.js";

/** Resolves to whether the person confirmed. */
export function confirmed({ title, text, yes, kind = "danger", field = null }) {
  return new Promise((resolve) => {
    const close = (answer) => {
      resolve(answer);
      dialog.close();
    };
    const dialog = element(
      "dialog",
      { "aria-labelledby": "dialog-title", "aria-describedby": "dialog-text", on: { close: () => (resolve(false), dialog.remove()) } },
      element("h2", { id: "dialog-title" }, title),
      element("p", { id: "dialog-text" }, text),
      field,
      element(
        "div",
        { class: "buttons" },
        element("button", { type: "button", on: { click: () => close(false) } }, "Cancel"),
        element("button", { type: "button", class: kind, on: { click: () => close(true) } }, yes),
      ),
    );
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Resolves to the whole number from 1 that the person gives, first `value`; 0 when none is given. */
export async function numbered({ label, value, ...asked }) {
  const input = element("input", { id: "dialog-number", type: "number", min: "1", step: "1", inputmode: "numeric", required: true, value: String(value) });
  const field = element("div", { class: "field" }, element("label", { for: "dialog-number" }, label), input);
  return (await confirmed({ ...asked, kind: "primary", field })) && input.checkValidity() ? Number(input.value) : 0;
}
