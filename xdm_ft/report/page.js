"use strict";
(() => {
  const contents = document.getElementById("contents");
  const wide = matchMedia("(min-width: 70rem)");
  const fit = () => { contents.open = wide.matches; };
  wide.addEventListener("change", fit);
  fit();

  // a link to a folded section opens it
  const unfold = () => {
    const section = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const folded = section && section.querySelector(":scope > details.folded");
    if (folded) folded.open = true;
  };
  addEventListener("hashchange", unfold);
  unfold();

  // paper has no lines to click
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details.folded:not([open])")];
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of closed) one.open = false;
    closed = [];
  });

  const compare = (a, b, column) => {
    const x = a.cells[column], y = b.cells[column];
    if ("value" in x.dataset && "value" in y.dataset) return Number(x.dataset.value) - Number(y.dataset.value);
    if ("value" in x.dataset || "value" in y.dataset) return "value" in x.dataset ? 1 : -1;
    return x.textContent.localeCompare(y.textContent);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Sort by this column";
      const printed = document.createElement("span");  // on the next page of a table, Chromium draws no button
      printed.className = "printed";
      printed.textContent = head.textContent;
      button.append(...head.childNodes);
      head.append(button, printed);
      button.addEventListener("click", () => {
        // numbers begin with the largest, words with A
        const numbers = [...table.tBodies[0].rows].some((row) => "value" in row.cells[column].dataset);
        const before = head.getAttribute("aria-sort");
        const rising = before ? before === "descending" : !numbers;
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", rising ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows].sort((a, b) => (rising ? 1 : -1) * compare(a, b, column));
        table.tBodies[0].append(...rows);
      });
    });
  }
})();
