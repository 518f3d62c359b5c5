/** Filling a field with a text file of the reader's. */

import { h, newId } from "./dom.js";

/** A button, and what belongs to it, that calls `use` with the text of a chosen file. */
export function textFileButton(use) {
  const file = h("input", { type: "file", accept: "text/*", class: "unseen", id: newId("file"), tabindex: "-1", "aria-hidden": "true" });
  file.addEventListener("change", async () => {
    const [chosen] = file.files;
    if (chosen) use(await chosen.text());
    file.value = "";
  });
  return [h("button", { type: "button", onclick: () => file.click() }, "Open a text file…"), file];
}
