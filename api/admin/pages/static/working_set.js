// The curve of hit rate against capacity, and what one more GiB of each tier would bring.
"use strict";

(() => {
  const box = document.getElementById("curve");
  const state = document.getElementById("state");
  const EVERY_MS = 15_000;
  let told = null;
  let timer = 0;
  let plot = null;

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function show(value, unit) {
    if (unit === "points") return value ? `+${(100 * value).toPrecision(2)} points` : "none";
    if (unit === "money") return Object.entries(value).map(([code, sum]) => `${cachesvc.format(Number(sum), unit)} ${code}`).join(" + ") || "–";
    return cachesvc.format(value === null || value === undefined ? null : Number(value), unit);
  }

  function fill(scope, values) {
    for (const output of scope.querySelectorAll("output[data-told]")) {
      const owner = output.closest("[data-advice]");
      if (scope === document && owner) continue;
      if (output.dataset.told in values) output.textContent = show(values[output.dataset.told], output.dataset.unit || "");
    }
  }

  // A line for each tier, where it and all above it end.
  function levels(u) {
    const { ctx } = u;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { tier, capacity_bytes: bytes } of told ? told.tiers : []) {
      if (!bytes || bytes < u.scales.x.min || bytes > u.scales.x.max) continue;
      const x = Math.round(u.valToPos(bytes, "x", true));
      ctx.strokeStyle = variable(`--${tier}`);
      ctx.beginPath();
      ctx.moveTo(x, u.bbox.top);
      ctx.lineTo(x, u.bbox.top + u.bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  function span() {
    const sizes = told ? [...told.capacities, ...told.tiers.map((each) => each.capacity_bytes)].filter((size) => size > 0) : [];
    if (!sizes.length) return [2 ** 20, 2 ** 30];
    return [2 ** Math.floor(Math.log2(Math.min(...sizes))), 2 ** Math.ceil(Math.log2(Math.max(...sizes) * 1.05))];
  }

  function tell(u) {
    const i = u.cursor.idx;
    const last = u.data[0].length - 1;
    const at = i === null || i === undefined ? last : i;
    document.getElementById("at-rate").textContent = cachesvc.format(u.data[1][at], "%");
    document.getElementById("at-size").textContent = cachesvc.format(u.data[0][at], "B");
  }

  function build() {
    const axis = { stroke: () => variable("--muted"), grid: { stroke: () => variable("--line"), width: 1 }, ticks: { show: false }, font: `11.5px ${variable("--sans")}` };
    plot = new uPlot({
      width: Math.max(120, box.clientWidth),
      height: box.clientHeight,
      legend: { show: false },
      padding: [8, 26, 0, 0],
      cursor: { drag: { x: false, y: false } },
      scales: { x: { time: false, distr: 3, log: 2, range: span }, y: { range: [0, 1] } },
      axes: [
        { ...axis, size: 24, gap: 6, space: 80, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : cachesvc.tick(tick, "B"))) },
        { ...axis, size: 52, values: (u, ticks) => ticks.map((tick) => `${Math.round(100 * tick)} %`) },
      ],
      series: [{}, { stroke: () => variable("--p95"), width: 2, points: { show: false } }],
      hooks: { draw: [levels], setCursor: [tell] },
    }, [[], []], box);
    new ResizeObserver(() => plot.setSize({ width: Math.max(120, box.clientWidth), height: box.clientHeight })).observe(box);
  }

  function draw(answer) {
    told = answer;
    const tiers = answer.tiers.filter((each) => each.capacity_bytes);
    fill(document, { ...answer, hit_rate: tiers.length ? tiers.at(-1).hit_rate : null });
    for (const each of answer.advice) {
      const row = document.querySelector(`[data-advice="${each.tier}"]`);
      if (row) fill(row, each);
    }
    for (const each of answer.tiers) {
      const output = document.querySelector(`[data-level="${each.tier}"]`);
      if (output) output.textContent = `${cachesvc.format(each.hit_rate, "%")} at ${cachesvc.format(each.capacity_bytes, "B")}`;
    }
    document.getElementById("early").hidden = answer.ready; // in the place of the other: nothing moves
    document.getElementById("usual").hidden = !answer.ready;
    plot.setData([answer.capacities, answer.hit_rates]);
    tell(plot);
    const words = tiers.map((each) => `${each.tier} ${cachesvc.format(each.hit_rate, "%")}`).join(", ");
    box.setAttribute("aria-label", `Hit rate against capacity; down to ${words}`);
  }

  async function poll() {
    clearTimeout(timer);
    try {
      if (document.hidden) return;
      const response = await fetch("/admin/api/cache/working-set", { headers: { Accept: "application/json" } });
      if (response.status === 401) location.assign(`/admin/login?next=${encodeURIComponent(location.pathname + location.search)}`);
      if (!response.ok) throw new Error(`the server answered ${response.status}`);
      draw(await response.json());
      state.className = "state live";
      state.textContent = "live";
    } catch (error) {
      state.className = "state lost";
      state.textContent = "no answer, retrying";
    } finally {
      timer = setTimeout(poll, EVERY_MS);
    }
  }

  document.addEventListener("themechange", () => plot.redraw(false, true));
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  build();
  poll();
})();
