"use strict";
// The page is complete without this script, which lets readers sort and filter tables, copy commands and see what a point
// of a figure or a term means. It requests nothing.
(() => {
  // -------------------------------------------------------------------- sorting

  /** Compares two sort keys: numbers by size, before texts. */
  function compare(a, b) {
    const [x, y] = [Number(a), Number(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) {
      if (Number.isNaN(x) && Number.isNaN(y)) return a.localeCompare(b, "en", { numeric: true });
      return Number.isNaN(x) ? 1 : -1;
    }
    return x === y ? 0 : x - y;
  }

  /** Sorts the rows of a table by a column; rows without a figure come last, and the exact row stays on top. */
  function sort(table, column, ascending) {
    const body = table.querySelector("tbody.rows");
    const keyed = [...body.rows].map((row) => ({ row, key: row.cells[column].dataset.key }));
    const missing = keyed.filter((each) => each.key === undefined);
    const present = keyed.filter((each) => each.key !== undefined);
    present.sort((a, b) => (ascending ? 1 : -1) * compare(a.key, b.key));
    body.append(...[...present, ...missing].map((each) => each.row));
  }

  /** Makes buttons of the heads of a table. Numbers start with the largest, names with the first. */
  function makeSortable(table) {
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    heads.forEach((head, column) => {
      const label = head.querySelector(".head");
      const button = document.createElement("button");
      button.type = "button";
      button.className = "head";
      button.textContent = label.textContent;
      label.replaceWith(button);
      button.addEventListener("click", () => {
        const now = head.getAttribute("aria-sort");
        const ascending = now ? now === "descending" : column === 0;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        sort(table, column, ascending);
      });
    });
  }

  // -------------------------------------------------------------------- filters

  /** Shows the rows that the form asks for, and says how many they are. The exact row always stays. */
  function filter(form) {
    const table = document.getElementById(form.dataset.table);
    const entries = [...table.querySelectorAll("tbody:not(.pinned) [data-entry]")];
    const wanted = form.elements.part.value.trim().toLowerCase();
    const keptOnly = Boolean(form.elements.kept && form.elements.kept.checked);
    for (const entry of entries) {
      const named = entry.dataset.entry.toLowerCase().includes(wanted);
      entry.hidden = !named || (keptOnly && !("kept" in entry.dataset));
    }
    for (const row of table.querySelectorAll("tbody.refused tr")) {
      row.hidden = !row.querySelector("[data-entry]:not([hidden])");
    }
    const shown = entries.filter((entry) => !entry.hidden).length;
    const besides = table.querySelector("tbody.pinned tr") ? ", and exact attention" : "";
    form.querySelector("output").value = `${shown} of ${entries.length} ${form.dataset.what} shown${besides}`;
  }

  function makeFilter(form) {
    form.hidden = false;
    form.addEventListener("input", () => filter(form));
    form.addEventListener("submit", (event) => event.preventDefault());
    filter(form);
  }

  // -------------------------------------------------------------------- copying

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea"); // where the page has no permission for the clipboard
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  }

  function makeCopyable(command) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.setAttribute("aria-live", "polite");
    button.addEventListener("click", async () => {
      await copy(command.querySelector("code").textContent);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
    command.append(button);
  }

  // -------------------------------------------------------------------- what a point or a term means

  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;
  let tipped = null;

  function show(element) {
    if (element === tipped) return;
    hide();
    tipped = element;
    tip.textContent = element.dataset.tip;
    tip.hidden = false;
    element.setAttribute("aria-describedby", "tip");
    element.classList.add("tipped");
    place();
  }

  /** Puts the text above what it is about, or below it where there is no room. */
  function place() {
    if (!tipped) return;
    const at = tipped.getBoundingClientRect();
    const left = Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
    const above = at.top - tip.offsetHeight - 8;
    tip.style.left = `${Math.max(left, 8)}px`;
    tip.style.top = `${above < 8 ? at.bottom + 8 : above}px`;
  }

  function hide() {
    if (!tipped) return;
    tipped.removeAttribute("aria-describedby");
    tipped.classList.remove("tipped");
    tipped = null;
    tip.hidden = true;
  }

  /** The text stays after a finger was lifted, until the next touch, and while its element has the focus. */
  function leave(event) {
    if (event.pointerType !== "touch" && tipped !== document.activeElement) hide();
  }

  /** Shows our own text in place of the browser's, which a keyboard or a finger does not reach. */
  function makeTipped(element, text) {
    element.dataset.tip = text;
    element.addEventListener("pointerenter", () => show(element));
    element.addEventListener("pointerleave", leave);
    element.addEventListener("focus", () => show(element));
    element.addEventListener("blur", hide);
  }

  /** How far a place is from an element, in pixels: from its box, and where boxes overlap, from its centre. */
  function distance(element, x, y) {
    const box = element.getBoundingClientRect();
    const outside = Math.hypot(Math.max(box.left - x, 0, x - box.right), Math.max(box.top - y, 0, y - box.bottom));
    const centre = Math.hypot((box.left + box.right) / 2 - x, (box.top + box.bottom) / 2 - y);
    return outside + centre / 1000;
  }

  /** Lets a pointer near a point, and the arrow keys, show the point's text. One point at a time is in the tab order. */
  function makePointed(drawing) {
    const points = [...drawing.querySelectorAll(".point")];
    points.forEach((point, place) => {
      const title = point.querySelector("title");
      makeTipped(point, title.textContent);
      point.setAttribute("aria-label", title.textContent.replaceAll("\n", ": "));
      point.setAttribute("tabindex", place ? "-1" : "0");
      title.remove();
    });
    const near = (event) => {
      const [x, y] = [event.clientX, event.clientY];
      const found = points.map((point) => ({ point, away: distance(point, x, y) }));
      const nearest = found.reduce((a, b) => (b.away < a.away ? b : a), { away: 20 });
      if (nearest.point) show(nearest.point);
      else leave(event);
    };
    drawing.addEventListener("pointermove", near);
    drawing.addEventListener("pointerdown", near);
    drawing.addEventListener("pointerleave", leave);
    drawing.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const place = points.indexOf(document.activeElement);
      if (!step || place < 0) return;
      event.preventDefault();
      const next = points[(place + step + points.length) % points.length];
      points[place].setAttribute("tabindex", "-1");
      next.setAttribute("tabindex", "0");
      next.focus();
    });
  }

  document.body.append(tip);
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  document.querySelectorAll("form.filters").forEach(makeFilter);
  document.querySelectorAll(".command").forEach(makeCopyable);
  document.querySelectorAll("main [title]").forEach((element) => {
    makeTipped(element, element.title);
    element.removeAttribute("title");
  });
  document.querySelectorAll(".plot > svg").forEach(makePointed);
  document.addEventListener("pointerdown", hide, { capture: true });
  document.addEventListener("scroll", place, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
})();
