"use strict";
(() => {
  const tables = [...document.querySelectorAll("table.sortable")];
  const number = cell => "value" in cell.dataset ? Number(cell.dataset.value) : null;

  function sort(table, place) {
    const heads = [...table.tHead.rows[0].cells], head = heads[place];
    const now = head.getAttribute("aria-sort");
    const down = now ? now === "ascending" : head.dataset.first === "descending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const words = head.classList.contains("word"), sign = down ? -1 : 1;
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const [one, two] = [a.cells[place], b.cells[place]];
      if (words) return sign * one.textContent.localeCompare(two.textContent, undefined, {numeric: true});
      const [x, y] = [number(one), number(two)];
      if (x === null || y === null) return (x === null) - (y === null);  // what has no value comes last, whichever way
      return sign * (x - y);
    });
    table.tBodies[0].append(...rows);
  }
  for (const table of tables)
    [...table.tHead.rows[0].cells].forEach((head, place) => head.querySelector("button").addEventListener("click", () => sort(table, place)));

  const box = document.querySelector(".filter");
  if (box) {
    const input = box.querySelector("input"), told = box.querySelector("output");
    const filter = () => {
      const wanted = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      const hidden = new Set();
      for (const table of tables)
        for (const row of table.tBodies[0].rows) {
          row.hidden = !wanted.every(word => row.textContent.toLowerCase().includes(word));
          if (table === tables[0] && row.hidden) hidden.add(row.cells[0].textContent);
        }
      for (const part of document.querySelectorAll("[data-label]")) part.toggleAttribute("hidden", hidden.has(part.dataset.label));
      const all = tables[0].tBodies[0].rows.length;
      told.textContent = wanted.length ? `${all - hidden.size} of ${all} rows` : "";
    };
    input.addEventListener("input", filter);
    box.hidden = false;
    filter();  // a browser that goes back to the page keeps what was typed
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {  // not allowed here: select it, for the keyboard
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => button.textContent = "Copy", 1500);
    });
  }
})();
