// Charts over the last three minutes, by uPlot (vendor/): few lines, the newest value beside each name.
import { colour, onTheme } from "./colours.js";
import { number, word } from "./words.js";

const SPAN_S = 180;
const HEIGHT = 130;
const CHARTS = [
  { title: "tokens_chart", lines: [["output_tokens_per_s", "output", "green"], ["prompt_tokens_per_s", "prompts", "blue"]] },
  { title: "ttft_chart", lines: [["ttft_p50_ms", "median", "blue"], ["ttft_max_ms", "most", "orange"]], points: true },
  { title: "step_chart", lines: [["step_p50_ms", "median", "blue"], ["step_p99_ms", "p99", "orange"]] },
  { title: "queue_chart", lines: [["num_running", "running", "green"], ["num_waiting", "waiting", "orange"], ["num_swapped", "swapped", "purple"]] },
];

export class Charts {
  constructor(place) {
    this.place = place;
    this.columns = [];
    this.points = [];
    this.build();
    onTheme(() => this.build());
    new ResizeObserver(() => this.resize()).observe(place);
  }

  snapshot({ columns, points }) {
    this.columns = columns;
    this.points = points;
    this.update();
  }

  add(point) {
    this.points.push(point);
    if (this.points.length > SPAN_S) this.points.shift();
    this.update();
  }

  /** The newest value of a column that was measured. */
  newest(name) {
    const place = this.columns.indexOf(name);
    return this.points.findLast((point) => point[place] !== null)?.[place] ?? null;
  }

  build() {
    this.charts?.forEach(({ plot }) => plot.destroy());
    this.place.replaceChildren();
    this.charts = CHARTS.map((chart) => this.buildOne(chart));
    this.update();
  }

  buildOne(chart) {
    const place = document.createElement("div");
    place.className = "chart";
    const title = document.createElement("h3");
    title.textContent = word(chart.title);
    const values = document.createElement("p");
    place.append(title, values);
    this.place.append(place);
    const axis = { stroke: colour("dim"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const plot = new uPlot(
      {
        width: place.clientWidth || 280,
        height: HEIGHT,
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 5 } },
        scales: { x: { time: false, range: (_, low) => [Math.min(-60, low ?? 0), 0] }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
        axes: [
          { ...axis, size: 24, splits: (_, __, low) => [-180, -120, -60, -30, 0].filter((each) => each >= low && (each !== -30 || low > -90)), values: (_, marks) => marks.map((each) => `${each} s`) },
          { ...axis, size: 48, values: (_, marks) => marks.map(number) },
        ],
        series: [{}, ...chart.lines.map(([, , name]) => ({
          stroke: colour(name), width: 1.6, spanGaps: true, points: { show: chart.points ?? false, size: 4, fill: colour(name) },
        }))],
        hooks: { setCursor: [(drawn) => this.tell(chart, values, drawn.cursor.idx)] },
      },
      [[], ...chart.lines.map(() => [])],
      place,
    );
    plot.root.setAttribute("aria-hidden", "true"); // the values are told above it
    return { chart, plot, values, place };
  }

  update() {
    const at = this.columns.indexOf("time_s");
    const now = this.points.at(-1)?.[at] ?? 0;
    for (const { chart, plot, values } of this.charts) {
      const lines = chart.lines.map(([name]) => this.points.map((point) => point[this.columns.indexOf(name)]));
      plot.setData([this.points.map((point) => point[at] - now), ...lines]);
      this.tell(chart, values, plot.cursor.idx);
    }
  }

  /** Write the values of a point, or the newest ones. */
  tell(chart, values, index) {
    const point = this.points[index ?? -1];
    values.replaceChildren(...chart.lines.flatMap(([name, label, colourName]) => {
      const line = document.createElement("b");
      line.className = `t-${colourName}`;
      const value = point ? point[this.columns.indexOf(name)] : this.newest(name);
      line.textContent = `${word(label)} ${number(value)}`;
      return [line, "  "];
    }));
  }

  resize() {
    for (const { plot, place } of this.charts) {
      if (place.clientWidth && place.clientWidth !== plot.width) plot.setSize({ width: place.clientWidth, height: HEIGHT });
    }
  }
}
