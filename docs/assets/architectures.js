// The filter of docs/architectures.md: words that a row must have, and an outcome. All rows are on the page without it.

// Whether a row, given as its cells, has all words and the outcome in its third column; "" is every outcome.
function architectureMatches(cells, text, outcome) {
  const all = cells.join(" ").toLowerCase();
  const words = text.toLowerCase().split(/\s+/);
  return words.every((word) => all.includes(word)) && (outcome === "" || cells[2] === outcome);
}

function addArchitectureFilter() {
  const place = document.getElementById("architecture-filter");
  if (!place) return;
  const rows = [...document.querySelectorAll("#architectures tbody tr")];
  const cells = rows.map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
  const options = [...new Set(cells.map((row) => row[2]))].map((name) => `<option>${name}</option>`);
  const search = '<input type="search" placeholder="model type, class or reason" aria-label="Filter model types by text">';
  const select = `<select aria-label="Outcome"><option value="">every outcome</option>${options.join("")}</select>`;
  place.innerHTML = `<form>${search} ${select} <output></output></form>`;
  const form = place.querySelector("form");
  const update = () => {
    const [text, outcome] = [form.querySelector("input").value, form.querySelector("select").value];
    rows.forEach((row, i) => (row.hidden = !architectureMatches(cells[i], text, outcome)));
    form.querySelector("output").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} model types`;
  };
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
}

if (typeof document$ !== "undefined") document$.subscribe(addArchitectureFilter);
