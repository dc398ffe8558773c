/* Questions that must be answered first. The dialog is the browser's own: it holds the focus, Escape means no, and the focus goes back
 * to where it was. */

import { element } from "./element.js";

/** Resolves to whether the person confirmed. */
export function confirmed({ title, text, yes }) {
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
      element(
        "div",
        { class: "buttons" },
        element("button", { type: "button", on: { click: () => close(false) } }, "Cancel"),
        element("button", { type: "button", class: "danger", on: { click: () => close(true) } }, yes),
      ),
    );
    document.body.append(dialog);
    dialog.showModal();
  });
}
