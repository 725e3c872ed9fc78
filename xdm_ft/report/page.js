"use strict";
(() => {
  const contents = document.getElementById("contents");
  const wide = matchMedia("(min-width: 70rem)");
  const fit = () => { contents.open = wide.matches; };
  wide.addEventListener("change", fit);
  fit();

  // a link to a folded section opens it, and what is around it
  const unfold = () => {
    const section = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const folded = section ? [...section.querySelectorAll(":scope > details.folded")] : [];
    if (!folded.length) return;
    for (const one of folded) one.open = true;
    for (let one = section; one; one = one.parentElement.closest("details")) if (one.tagName === "DETAILS") one.open = true;
    section.scrollIntoView();
  };
  addEventListener("hashchange", unfold);
  // a second click on the same link changes no hash
  contents.addEventListener("click", (event) => { if (event.target.closest("a")) setTimeout(unfold); });
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

  // figures: the value of the point that is nearest to the pointer, and buttons that hide series
  const NEAR = 24;  // CSS pixels
  const value = document.createElement("div");
  value.id = "value";
  value.hidden = true;
  document.body.append(value);
  const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
  ring.setAttribute("class", "pointer");
  ring.setAttribute("r", "5");
  const leave = () => { value.hidden = true; ring.remove(); };
  const hidden = (svg, number) => svg.querySelector(`[data-series="${number}"][display="none"]`);

  const figures = [...document.querySelectorAll("svg[data-points]")].map((svg) => ({svg, series: JSON.parse(svg.dataset.points)}));
  for (const {svg, series} of figures) {
    svg.addEventListener("pointermove", (event) => {
      const matrix = svg.getScreenCTM();
      let nearest, least = NEAR;
      series.forEach(([name, , points], number) => {
        if (hidden(svg, number)) return;
        for (const [x, y, text] of points) {
          const at = new DOMPoint(x, y).matrixTransform(matrix);
          const distance = Math.hypot(at.x - event.clientX, at.y - event.clientY);
          if (distance < least) [nearest, least] = [{name, x, y, text, at}, distance];
        }
      });
      if (!nearest) return leave();
      value.textContent = nearest.name ? `${nearest.name}\n${nearest.text}` : nearest.text;
      value.hidden = false;
      ring.setAttribute("cx", nearest.x);
      ring.setAttribute("cy", nearest.y);
      svg.append(ring);
      const left = Math.min(nearest.at.x + 12, innerWidth - value.offsetWidth - 8);
      const above = nearest.at.y - value.offsetHeight - 10;
      value.style.left = `${Math.max(left, 8)}px`;
      value.style.top = `${above < 8 ? nearest.at.y + 12 : above}px`;
    });
    svg.addEventListener("pointerleave", leave);
  }
  addEventListener("scroll", leave, {passive: true});

  for (const section of new Set(figures.map(({svg}) => svg.closest("section")))) {
    const own = figures.filter(({svg}) => svg.closest("section") === section);
    const names = new Set(own.flatMap(({series}) => series.map(([, button]) => button)).filter((name) => name));
    if (names.size < 2) continue;
    const row = document.createElement("div");
    row.className = "series";
    row.setAttribute("role", "group");
    row.setAttribute("aria-label", "Shown in the figures");
    for (const name of names) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") === "false";
        button.setAttribute("aria-pressed", String(shown));
        for (const {svg, series} of own) {
          series.forEach(([, of], number) => {
            if (of !== name) return;
            for (const part of svg.querySelectorAll(`[data-series="${number}"]`)) part.setAttribute("display", shown ? "inline" : "none");
          });
          const of = series.map(([, button]) => button);
          svg.closest("figure").hidden = of.every((button, number) => button && hidden(svg, number));
        }
        leave();
      });
      row.append(button);
    }
    section.querySelector(".beside").before(row);
  }
})();
