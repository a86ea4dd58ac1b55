"use strict";

// Charts: figures name colours as the style does ("--bar"), so that they follow light and dark.
const figures = JSON.parse(document.getElementById("figures").textContent);

function withColors(value, style) {
  if (typeof value === "string") return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
  if (Array.isArray(value)) return value.map((item) => withColors(item, style));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, withColors(item, style)]));
}

function drawCharts() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: color("--grid"), linecolor: color("--line"), tickfont: { color: color("--text") } };
  for (const div of document.querySelectorAll(".chart")) {
    const figure = withColors(figures[div.dataset.chart], style);
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: color("--muted") },
      hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--text") }, align: "left" },
      ...figure.layout,
    };
    for (const name of ["xaxis", "xaxis2", "yaxis"]) {
      if (layout[name]) layout[name] = { ...axis, ...layout[name], tickfont: { ...axis.tickfont, ...layout[name].tickfont } };
    }
    Plotly.react(div, figure.data, layout, { displayModeBar: false, responsive: true });
  }
}

drawCharts();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);

// The table: a run is a tbody of its row and the row of its details, which move together.
const table = document.getElementById("table");

function compare(one, other, isNumber, direction) {
  if (!isNumber) return direction * one.localeCompare(other, undefined, { numeric: true });
  const [a, b] = [parseFloat(one), parseFloat(other)];
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b); // without a figure: last, always
  return direction * (a - b);
}

function sortBy(header) {
  const column = header.cellIndex;
  const isNumber = header.dataset.type === "number";
  const current = header.getAttribute("aria-sort");
  const isAscending = current ? current === "descending" : !isNumber || column === 0;
  for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", isAscending ? "ascending" : "descending");
  const value = (body) => body.rows[0].cells[column].dataset.value;
  const sorted = [...table.tBodies].sort((a, b) => compare(value(a), value(b), isNumber, isAscending ? 1 : -1));
  table.append(...sorted);
}

for (const header of table.tHead.rows[0].cells) {
  header.firstElementChild.addEventListener("click", () => sortBy(header));
}

function toggleDetail(row) {
  const detail = row.nextElementSibling;
  detail.hidden = !detail.hidden;
  row.setAttribute("aria-expanded", String(!detail.hidden));
}

for (const row of table.querySelectorAll("tr.run")) {
  row.addEventListener("click", () => { if (!getSelection().toString()) toggleDetail(row); });
  row.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggleDetail(row); }
  });
}

// Commands: a page opened from a file has no clipboard everywhere, so the text is selected as well.
for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    getSelection().selectAllChildren(code);
    const isCopied = navigator.clipboard
      ? await navigator.clipboard.writeText(code.textContent).then(() => true, () => document.execCommand("copy"))
      : document.execCommand("copy");
    button.textContent = isCopied ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
