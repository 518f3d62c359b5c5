/** Tables of figures. A wide one scrolls in its own region, which the keyboard reaches. */

import { h } from "./dom.js";

/**
 * A table with its title.
 *
 * @param heads of the columns. The first is of the rows' names; what stands in the others is aligned to the right.
 * @param rows of cells, each a text, an element or an array of these.
 * @param empty what is said where there are no rows.
 */
export function table(title, heads, rows, empty) {
  const head = (text, index) => h("th", { scope: "col", class: index > 0 && "number" }, text);
  const row = ([name, ...cells]) =>
    h("tr", {}, h("th", { scope: "row" }, ...[name].flat()), ...cells.map((cell) => h("td", { class: "number" }, ...[cell].flat())));
  const nothing = h("tr", {}, h("td", { colspan: heads.length, class: "muted" }, empty));
  return h(
    "div",
    {},
    h("h3", {}, title),
    h(
      "div",
      { class: "scrolls", tabindex: "0", role: "region", "aria-label": title },
      h(
        "table",
        { "aria-label": title },
        h("thead", {}, h("tr", {}, ...heads.map(head))),
        h("tbody", {}, ...(rows.length ? rows.map(row) : [nothing])),
      ),
    ),
  );
}
