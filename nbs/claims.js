// Sorts and filters the table of all claims. Without it the table is whole, in the paper's order; nothing is fetched.
(() => {
  const table = document.querySelector("table.claims"), body = table && table.tBodies[0];
  if (!body || table.dataset.live) return;
  table.dataset.live = "yes";
  const rows = [...body.rows], order = new Map(rows.map((r, i) => [r, i]));
  const distinct = name => [...new Set(rows.map(r => r.dataset[name]))].sort();
  const choice = (name, all, say = x => x) => `<label>${name} <select name="${name}"><option value="">${all}</option>` +
    distinct(name).map(v => `<option value="${v}">${say(v)}</option>`).join("") + "</select></label>";
  const form = document.createElement("form");
  form.className = "claims-find";
  form.innerHTML = '<label>find <input type="search" name="word" placeholder="router, GLU, 4.2"></label>' +
    choice("verdict", "all verdicts") + choice("paper", "all papers", v => v === "000" ? "the main paper" : v) +
    '<output role="status"></output>';
  table.before(form);
  const show = () => {
    const word = form.word.value.trim().toLowerCase();
    for (const r of rows) r.hidden = !(r.textContent.toLowerCase().includes(word) &&
      ["verdict", "paper"].every(n => !form[n].value || r.dataset[n] === form[n].value));
    form.querySelector("output").textContent = `${rows.filter(r => !r.hidden).length} of ${rows.length} claims`;
  };
  form.addEventListener("input", show);
  form.addEventListener("submit", e => e.preventDefault());
  [...table.tHead.rows[0].cells].forEach((th, i) => {
    th.innerHTML = `<button type="button">${th.textContent}</button>`;
    th.firstChild.addEventListener("click", () => {
      const way = th.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      th.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      const key = r => r.cells[i].textContent;
      const less = (a, b) => (i === 0 ? order.get(a) - order.get(b) : key(a).localeCompare(key(b), "en", { numeric: true }));
      body.append(...rows.sort((a, b) => way * less(a, b) || order.get(a) - order.get(b)));
    });
  });
  const land = () => {                                     // a link to a claim opens its readings, whatever is filtered
    const row = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!row || row.parentNode !== body) return;
    form.reset(); show();
    row.querySelector("details").open = true;
    row.scrollIntoView();
  };
  show(); land();
  addEventListener("hashchange", land);
})();
