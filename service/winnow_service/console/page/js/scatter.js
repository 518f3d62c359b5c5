/** A plot of points over two figures, with uPlot's axes: lines join them, and a click chooses one. */

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { h } from "./dom.js";
import { colour, theme } from "./theme.js";

const HEIGHT = 340;
const COLOURS = 5;
const SHAPES = 4;
const DASH = [5, 4];
// uPlot's numbers for scales.
const LINEAR = 1;
const LOGARITHMIC = 3;

/** The classes that a line's points and its swatch have, so that neither colour nor shape alone tells lines apart. */
export function markerOf(line) {
  return `marker shape-${(line % SHAPES) + 1} series-${(line % COLOURS) + 1}`;
}

export class Scatter {
  #choose;
  #shown = null;
  #plot = null;
  #markers = [];

  /** @param choose called with the `item` of a point that was clicked. */
  constructor(choose) {
    this.#choose = choose;
    // All of it stands in a table, too, and buttons do there what a click does here.
    this.element = h("div", { class: "scatter", "aria-hidden": "true" });
    theme.addEventListener("change", () => this.#build());
    new ResizeObserver(() => this.#fit()).observe(this.element);
  }

  /**
   * Show points.
   *
   * @param shown `x` and `y`, each with a `label`, a `range`, a `format`, `isLog`, `rules` (the values that get a line across
   *   the plot) and, where uPlot is not to choose them, `labelled` (the values that get a label); `lines`, each of points
   *   with `x`, `y`, `worse` (where the interval of y ends), `words`, `item` (null if it cannot be chosen) and `isOnFront`.
   */
  show(shown) {
    this.#shown = shown;
    this.#build();
  }

  #fit() {
    if (this.#plot === null) this.#build();
    else this.#plot.setSize(this.#size());
  }

  #size() {
    return { width: Math.max(1, this.element.clientWidth), height: HEIGHT };
  }

  #build() {
    this.#plot?.destroy();
    this.#plot = null;
    if (this.#shown === null || this.element.clientWidth === 0) return;
    const { x, y } = this.#shown;
    const [muted, line] = [colour("--muted"), colour("--line")];
    const font = "11px system-ui, sans-serif";
    const style = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font, labelFont: font, labelSize: 18 };
    const axis = ({ label, format, labelled }) => ({
      ...style,
      label,
      values: (_, values) => values.map((value) => (value === null ? "" : format(value))),
      ...(labelled && { splits: () => labelled, filter: (_, values) => values }),
    });
    this.#plot = new uPlot(
      {
        ...this.#size(),
        legend: { show: false },
        cursor: { show: false },
        scales: { x: { time: false, distr: x.isLog ? LOGARITHMIC : LINEAR, range: () => x.range }, y: { distr: y.isLog ? LOGARITHMIC : LINEAR, range: () => y.range } },
        axes: [{ ...axis(x), size: 30, space: 70 }, { ...axis(y), size: 58 }],
        series: [{}, { show: true, points: { show: false }, stroke: "transparent" }],
        hooks: { draw: [(plot) => this.#draw(plot)], ready: [(plot) => this.#mark(plot)] },
      },
      [x.range, [null, null]],
      this.element,
    );
  }

  #mark(plot) {
    this.#markers = this.#shown.lines.flatMap((points, line) =>
      points.map((point) => {
        const choosable = point.item !== null && { onclick: () => this.#choose(point.item) };
        const kinds = [markerOf(line), point.isOnFront && "on-front", point.item !== null && "choosable"].filter(Boolean);
        const element = h("span", { class: kinds.join(" "), title: point.words, ...choosable });
        plot.over.append(element);
        return { element, point };
      }),
    );
    this.#place(plot);
  }

  #place(plot) {
    for (const { element, point } of this.#markers) {
      element.style.setProperty("left", `${plot.valToPos(point.x, "x")}px`);
      element.style.setProperty("top", `${plot.valToPos(point.y, "y")}px`);
    }
  }

  #draw(plot) {
    const { ctx, bbox } = plot;
    const { x, y, lines } = this.#shown;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const scaled = (width) => width * uPlot.pxRatio;
    const at = ({ x }, y) => [plot.valToPos(x, "x", true), plot.valToPos(y, "y", true)];
    const stroke = (places, { property, width, dash = [] }) => {
      ctx.strokeStyle = colour(property);
      ctx.lineWidth = scaled(width);
      ctx.setLineDash(dash.map(scaled));
      ctx.beginPath();
      places.forEach(([left, top], index) => (index === 0 ? ctx.moveTo(left, top) : ctx.lineTo(left, top)));
      ctx.stroke();
    };
    const rule = (from, to) => stroke([from, to], { property: "--muted", width: 1, dash: DASH });
    for (const value of y.rules) {
      const top = plot.valToPos(value, "y", true);
      rule([bbox.left, top], [bbox.left + bbox.width, top]);
    }
    for (const value of x.rules) {
      const left = plot.valToPos(value, "x", true);
      rule([left, bbox.top], [left, bbox.top + bbox.height]);
    }
    const front = lines.flat().filter(({ isOnFront }) => isOnFront).sort((one, other) => one.x - other.x);
    stroke(front.map((point) => at(point, point.y)), { property: "--line-strong", width: 5 });
    lines.forEach((points, line) => {
      const property = `--series-${(line % COLOURS) + 1}`;
      stroke(points.map((point) => at(point, point.y)), { property, width: 1.5 });
      for (const point of points) stroke([at(point, point.y), at(point, point.worse)], { property, width: 1.5 });
    });
    ctx.restore();
    this.#place(plot);
  }
}
