// The filter of docs/methods.md: a text, and properties that the shown methods must have. All rows are on the page without it.

// Label, column of the tables, and what a cell of that column must match.
const METHOD_FILTERS = [
  ["no training", "training", /^none/],
  ["no training or calibration only", "training", /^none|calibration/],
  ["sub-quadratic", "sub-quadratic", /^yes/],
  ["causal", "causal", /^yes/],
  ["causal in inference", "causal", /^(yes|values)/],
  ["cross-attention", "cross-attention", /✓/],
  ["window", "window", /✓/],
  ["dense mask and bias", "dense mask", /✓/],
  ["cached steps", "cached steps", /✓/],
  ["fixed state", "fixed state", /✓/],
  ["keep=", "keep=", /✓/],
  ["exact limit", "exact when", /^(?!never)/],
  ["compiled on the CPU", "compiled on the CPU", /^(?!none)/],
];

// Names of the methods whose cells have the text and match all chosen filters; `methods` is {name: {column: cell}}.
function filteredMethods(methods, text, labels) {
  const wanted = METHOD_FILTERS.filter(([label]) => labels.includes(label));
  const words = text.toLowerCase().split(/\s+/);
  return Object.keys(methods).filter((name) => {
    const cells = methods[name];
    const all = Object.values(cells).join(" ").toLowerCase();
    return words.every((word) => all.includes(word)) && wanted.every(([, column, cell]) => cell.test(cells[column]));
  });
}

// The rows of all tables with a column "method", by the method's name, and their cells.
function methodRows() {
  const rows = {}, methods = {};
  for (const table of document.querySelectorAll("article table")) {
    const heads = [...table.querySelectorAll("th")].map((head) => head.textContent.trim());
    if (heads[0] !== "method") continue;
    for (const row of table.querySelectorAll("tbody tr")) {
      const cells = [...row.cells].map((cell) => cell.textContent.trim());
      (rows[cells[0]] ||= []).push(row);
      methods[cells[0]] = { ...methods[cells[0]], ...Object.fromEntries(heads.map((head, i) => [head, cells[i]])) };
    }
  }
  return [rows, methods];
}

function addMethodFilter() {
  const place = document.getElementById("method-filter");
  if (!place) return;
  const [rows, methods] = methodRows();
  const boxes = METHOD_FILTERS.map(([label]) => `<label><input type="checkbox" value="${label}"> ${label}</label>`);
  const search = '<input type="search" placeholder="name, family or use" aria-label="Filter methods by text">';
  place.innerHTML = `<form>${search}<fieldset>${boxes.join("")}</fieldset><output></output></form>`;
  const form = place.querySelector("form");
  const update = () => {
    const labels = [...form.querySelectorAll("input:checked")].map((box) => box.value);
    const names = filteredMethods(methods, form.querySelector("input[type=search]").value, labels);
    for (const name of Object.keys(rows)) for (const row of rows[name]) row.hidden = !names.includes(name);
    form.querySelector("output").textContent = `${names.length} of ${Object.keys(methods).length} methods`;
  };
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
}

if (typeof document$ !== "undefined") document$.subscribe(addMethodFilter);
