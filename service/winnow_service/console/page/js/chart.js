/** A chart of figures over time, with uPlot: the names and newest values stand beside it as text. */

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { fill, h } from "./dom.js";
import { colour, theme } from "./theme.js";

const HEIGHT = 150;
const MAX_SERIES = 5;
// Series are told apart by their dashes, too.
const DASHES = [undefined, [6, 3], [2, 2], [8, 3, 2, 3], [1, 3]];

export class Chart {
  #legend = h("ul", { class: "legend" });
  #canvas = h("div", { class: "chart", "aria-hidden": "true" });
  #format;
  #names = [];
  #data = [[]];
  #plot = null;

  /**
   * @param title of the figure.
   * @param format a value as text.
   */
  constructor(title, format) {
    this.#format = format;
    this.element = h("figure", { class: "card" }, h("figcaption", {}, h("h3", {}, title), this.#legend), this.#canvas);
    theme.addEventListener("change", () => this.#build());
    new ResizeObserver(() => this.#plot?.setSize(this.#size())).observe(this.#canvas);
  }

  /**
   * Show values over time.
   *
   * @param times in seconds.
   * @param series of names, each with as many values as there are times; null where there is none.
   */
  show(times, series) {
    const shown = Object.entries(series).slice(0, MAX_SERIES);
    const names = shown.map(([name]) => name);
    this.#data = [times, ...shown.map(([, values]) => values)];
    const isOther = names.join("\n") !== this.#names.join("\n");
    this.#names = names;
    if (isOther || this.#plot === null) this.#build();
    else this.#plot.setData(this.#data);
    this.#tell(this.#data[0].length - 1);
  }

  #tell(index) {
    fill(
      this.#legend,
      ...this.#names.map((name, which) => {
        const swatch = h("span", { class: "swatch", "aria-hidden": "true" });
        swatch.style.setProperty("--series", `var(--series-${which + 1})`);
        return h("li", {}, swatch, `${name} `, h("strong", {}, this.#format(this.#data[which + 1][index])));
      }),
    );
  }

  #size() {
    return { width: Math.max(1, this.#canvas.clientWidth), height: HEIGHT };
  }

  #build() {
    this.#plot?.destroy();
    this.#plot = null;
    if (this.#names.length === 0 || this.#canvas.clientWidth === 0) return;
    const [muted, line] = [colour("--muted"), colour("--line")];
    const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui, sans-serif" };
    this.#plot = new uPlot(
      {
        ...this.#size(),
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false } },
        scales: { y: { range: (_, __, highest) => [0, (highest ?? 0) > 0 ? highest * 1.1 : 1] } },
        axes: [
          { ...axis, space: 90, size: 30, values: (_, times) => times.map(clock) },
          { ...axis, size: 60, values: (_, values) => values.map((value) => this.#format(value)) },
        ],
        series: [{}, ...this.#names.map((name, which) => this.#series(name, which))],
        hooks: { setCursor: [({ cursor }) => this.#tell(cursor.idx ?? this.#data[0].length - 1)] },
      },
      this.#data,
      this.#canvas,
    );
  }

  #series(label, which) {
    return { label, stroke: colour(`--series-${which + 1}`), width: 1.75, dash: DASHES[which], points: { show: false } };
  }
}

function clock(time) {
  return new Date(time * 1000).toLocaleTimeString([], { hour12: false });
}
