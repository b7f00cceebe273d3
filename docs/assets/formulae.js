// Sets the formulae of a page with KaTeX, which lies beside the pages. Material's `document$` emits once per page.
document$.subscribe(() => {
  for (const place of document.querySelectorAll(".formula")) {
    katex.render(place.textContent, place, { displayMode: true, throwOnError: false });
  }
});
