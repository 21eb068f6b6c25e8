// How long blocks live, lie idle and wait: columns of bars, one for each tier, from the start of
// the server until now.
"use strict";

(() => {
  const figures = [...document.querySelectorAll("[data-spread]")];
  const EVERY_MS = 10_000;

  // The time below which half of the values lie: the bucket's upper bound, an upper estimate.
  function median({ bounds, counts }) {
    const total = counts.reduce((sum, count) => sum + count, 0);
    let below = 0;
    for (let i = 0; i < counts.length && total; i += 1) {
      below += counts[i];
      if (below * 2 >= total) return `half within ${i < bounds.length ? cachesvc.format(bounds[i], "s") : "months"}`;
    }
    return "none yet";
  }

  function column(shares, names, label) {
    const box = document.createElement("div");
    box.title = label;
    for (const [i, share] of shares.entries()) {
      const bar = document.createElement("i");
      bar.className = names[i];
      bar.style.setProperty("--share", `${share}%`);
      box.append(bar);
    }
    return box;
  }

  function draw(figure, tiers) {
    const names = figure.dataset.tiers.split(" ").filter((name) => tiers[name]);
    const spreads = names.map((name) => tiers[name].lives[figure.dataset.spread]);
    const totals = spreads.map(({ counts }) => counts.reduce((sum, count) => sum + count, 0));
    const shares = spreads.map(({ counts }, i) => counts.map((count) => (totals[i] ? count / totals[i] : 0)));
    const most = Math.max(0.01, ...shares.flat());
    const { bounds } = spreads[0];
    const labels = bounds.map((bound) => cachesvc.tick(bound, "s")).concat("more");
    figure.querySelector(".columns").replaceChildren(...labels.map((label, at) => column(
      shares.map((each) => (100 * each[at]) / most),
      names,
      names.map((name, i) => `${name}: ${spreads[i].counts[at]} of ${totals[i]} within ${label}`).join("\n"),
    )));
    figure.querySelector(".marks").replaceChildren(...labels.map((label, at) => {
      const mark = document.createElement("span");
      mark.textContent = at % 3 === 0 ? label : "";
      return mark;
    }));
    const told = spreads.map(median);
    figure.querySelectorAll("output").forEach((output, i) => { output.textContent = told[i] || "–"; });
    figure.querySelector(".columns").setAttribute("aria-label", names.map((name, i) => `${name}: ${told[i]}`).join(", "));
  }

  async function poll() {
    try {
      if (document.hidden) return;
      const response = await fetch("/admin/api/stats", { headers: { Accept: "application/json" } });
      if (!response.ok) return;
      const { cache } = await response.json();
      figures.forEach((figure) => draw(figure, cache.tiers));
    } finally {
      setTimeout(poll, EVERY_MS);
    }
  }

  poll();
})();
