// The schedule of one executor, drawn as the README draws it: rows are sequences, columns are steps.
import { colour, context } from "./colours.js";
import { word, yours } from "./words.js";

const [WAITING, IDLE, UNUSED, DECODE, SEVERAL, PREFILL] = [1, 2, 3, 4, 5, 6]; // cadenza.schedule.Cell
const ROW = 15;
const CELL = 7;
const RIGHT = 62; // for the numbers of tokens
const MAX_COLUMNS = 400;
const [PLACE, SEQUENCE, LABEL, PROMPT, OUTPUT, ENDED, SINCE] = [0, 1, 2, 3, 4, 5, 6];

export class Schedule {
  constructor(canvas, names) {
    this.canvas = canvas;
    this.names = names; // the numbers of the page's own requests
    this.clear();
  }

  clear() {
    this.rows = [];
    this.columns = [];
    this.hidden = 0;
    this.lines = 1; // the most that were drawn, so that what is below does not move all the time
  }

  add({ rows, columns, hidden }) {
    this.rows = rows;
    this.hidden = hidden;
    this.columns = this.columns.concat(columns).slice(-MAX_COLUMNS);
  }

  /** The label of a sequence; undefined: it is in no row. */
  labelOf(sequence) {
    const row = this.rows.find((each) => each[SEQUENCE] === sequence);
    return row && this.short(row[LABEL]);
  }

  isMine(sequence) {
    const row = this.rows.find((each) => each[SEQUENCE] === sequence);
    return row !== undefined && this.names.has(row[LABEL]);
  }

  short(label) {
    if (this.names.has(label)) return yours(this.names.get(label));
    return /^[0-9a-f]{32}/.test(label) ? label.slice(0, 8) + label.slice(32) : label;
  }

  get batch() {
    return this.columns.at(-1)?.[2] ?? 0;
  }

  draw(index) {
    const left = Math.min(150, Math.max(88, this.canvas.clientWidth * 0.15));
    const count = Math.max(1, Math.floor((this.canvas.clientWidth - left - RIGHT) / CELL));
    const shown = this.columns.slice(-count);
    const rows = this.rows.filter((row) => !row[ENDED] || shown.some((column) => isIn(row, column)));
    this.lines = Math.max(this.lines, rows.length);
    const { drawing, width } = context(this.canvas, (this.lines + 2) * ROW + 2);
    drawing.font = `11px ${colour("mono")}`;
    drawing.textBaseline = "middle";
    rows.forEach((row, line) => this.drawRow(drawing, row, shown, { y: line * ROW, left, width }));
    this.drawAxis(drawing, shown, { y: this.lines * ROW, left });
    this.canvas.setAttribute("aria-label", word("schedule_label", index, this.batch));
  }

  drawRow(drawing, row, shown, { y, left, width }) {
    const mine = this.names.has(row[LABEL]);
    drawing.fillStyle = colour(mine ? "orange" : row[ENDED] ? "dim" : "ink");
    drawing.textAlign = "left";
    drawing.save();
    drawing.beginPath();
    drawing.rect(0, y, left - 6, ROW);
    drawing.clip();
    drawing.fillText(this.short(row[LABEL]), 0, y + ROW / 2);
    drawing.restore();
    drawing.fillStyle = colour("dim");
    drawing.textAlign = "right";
    drawing.fillText(`${row[PROMPT] || "?"}+${row[OUTPUT]}`, width, y + ROW / 2);
    shown.forEach((column, place) => {
      if (isIn(row, column)) drawCell(drawing, Number(column[3][row[PLACE]]), left + place * CELL, y);
    });
  }

  drawAxis(drawing, shown, { y, left }) {
    drawing.fillStyle = colour("dim");
    drawing.textAlign = "left";
    drawing.fillText(word("batch"), 0, y + ROW / 2);
    drawing.fillText(word("step"), 0, y + ROW * 1.5);
    const top = Math.max(1, ...shown.map((column) => column[2]));
    shown.forEach(([column, step, batch], place) => {
      const x = left + place * CELL;
      const bar = Math.max(1, (batch / top) * (ROW - 3));
      drawing.fillStyle = colour("purple");
      drawing.fillRect(x, y + ROW - 1 - bar, CELL - 1, bar);
      if (column % 20 === 0) {
        drawing.fillStyle = colour("dim");
        drawing.fillRect(x, y + ROW + 1, 1, 4);
        drawing.fillText(`${step}`, x + 3, y + ROW * 1.5 + 1);
      }
    });
    if (shown.length) {
      drawing.fillStyle = colour("ink");
      drawing.fillText(`${this.batch}`, left + shown.length * CELL + 4, y + ROW / 2);
    }
  }
}

/** Whether a row has a cell in a column; its place may have been another row's before. */
function isIn(row, [column, , , cells]) {
  return column >= row[SINCE] && cells[row[PLACE]] !== "0";
}

function drawCell(drawing, cell, x, y) {
  const middle = y + ROW / 2;
  switch (cell) {
    case PREFILL:
      drawing.fillStyle = colour("blue");
      drawing.fillRect(x, y + 1, CELL - 1, ROW - 3);
      break;
    case SEVERAL:
      drawing.fillStyle = colour("green");
      drawing.fillRect(x + 1, y + 2, CELL - 3, ROW - 5);
      break;
    case DECODE:
      drawing.fillStyle = colour("green");
      drawing.fillRect(x + 1, middle - 3, CELL - 2, 5);
      break;
    case UNUSED:
      drawing.strokeStyle = colour("red");
      drawing.beginPath();
      drawing.moveTo(x + 1, middle - 3);
      drawing.lineTo(x + 5, middle + 2);
      drawing.moveTo(x + 5, middle - 3);
      drawing.lineTo(x + 1, middle + 2);
      drawing.stroke();
      break;
    case IDLE:
      drawing.fillStyle = colour("dim");
      drawing.fillRect(x + 1, middle - 1, CELL - 3, 1);
      break;
    case WAITING:
      drawing.fillStyle = colour("dim");
      drawing.fillRect(x + 2, middle - 1, 2, 2);
      break;
  }
}
