// One chart: a figure with `data-chart`, drawn by uPlot. All charts of a page share their cursor.
"use strict";

(() => {
  const sync = uPlot.sync("page");
  const CODES = { 2: "good", 3: "p95", 4: "warn", 5: "bad" };
  // Errors of a class are told apart: a wrong request, no key, no money, nothing there, too much.
  const CODE = { 400: "warn", 401: "remote", 402: "p99", 403: "disk", 404: "device", 429: "computed" };
  const BINARY = Array.from({ length: 50 }, (_, power) => 2 ** power); // bytes are marked in these
  const probe = document.createElement("i");

  // The colour that a class of the style sheet stands for, in the theme of now.
  function colour(name) {
    probe.className = `swatch ${name}`;
    document.body.append(probe);
    const found = getComputedStyle(probe).backgroundColor;
    probe.remove();
    return found;
  }

  function variable(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  // Values without a neighbour, which no line would show.
  function lonely(plot, line) {
    const values = plot.data[line];
    const is = (i) => (values[i] ?? null) !== null;
    return values.map((_, i) => i).filter((i) => is(i) && !is(i - 1) && !is(i + 1));
  }

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.plan = JSON.parse(figure.dataset.chart);
      this.box = figure.querySelector(".plot");
      this.legend = figure.querySelector(".legend");
      this.queries = this.plan.series.map(([, , query]) => query);
      this.lines = this.plan.series.filter(([label]) => label);
      this.times = [];
      this.raw = [];
      this.build();
      new ResizeObserver(() => this.plot.setSize(this.size())).observe(this.box);
    }

    size() {
      return { width: Math.max(120, this.box.clientWidth), height: this.box.clientHeight };
    }

    // A query that stands for several series brings its lines with the first answer.
    adopt(names) {
      const known = new Set(this.lines.map(([, , query]) => query));
      let grown = false;
      for (const [label, kind, query] of this.plan.series) {
        if (label) continue;
        const [before, after] = query.replace("s:", ":").split("*");
        for (const name of names) {
          if (known.has(name) || !name.startsWith(before) || !name.endsWith(after)) continue;
          const found = name.slice(before.length, name.length - after.length);
          this.lines.push([found, kind === "code" ? CODE[found] || CODES[found[0]] || "computed" : found, name]);
          known.add(name);
          grown = true;
        }
      }
      if (!grown) return;
      this.lines.sort(([a], [b]) => (a < b ? -1 : 1));
      this.legend.replaceChildren(...this.lines.map(([label, name]) => {
        const item = document.createElement("li");
        const swatch = document.createElement("i");
        swatch.className = `swatch ${name}`;
        item.append(swatch, `${label} `, document.createElement("output"));
        return item;
      }));
      this.plot.destroy();
      this.build();
    }

    show(times, columns, window_s) {
      this.times = times;
      this.window_s = window_s;
      const scale = this.plan.scale || 1;
      this.raw = this.lines.map(([, , query]) => (columns[query] || times.map(() => null)).map((v) => (v === null ? null : v * scale)));
      this.plot.setData([times, ...(this.plan.stack ? this.stacked() : this.raw)]);
      this.tell(this.plot.cursor.idx);
    }

    // Each line on top of those after it; the first is drawn first and so lies behind.
    stacked() {
      const sums = [];
      let below = this.times.map(() => 0);
      for (let line = this.raw.length - 1; line >= 0; line -= 1) {
        below = this.raw[line].map((value, i) => below[i] + (value || 0));
        sums.unshift(below);
      }
      return sums;
    }

    // The legend's numbers: under the cursor, or the latest.
    tell(index) {
      const outputs = this.legend.querySelectorAll("output");
      const told = this.lines.map(([label], line) => {
        const values = this.raw[line] || [];
        const value = index === null || index === undefined ? values.findLast((v) => v !== null) : values[index];
        const text = cachesvc.format(value, this.plan.unit);
        if (outputs[line] && outputs[line].textContent !== text) outputs[line].textContent = text;
        return `${label} ${text}`;
      });
      this.box.setAttribute("aria-label", `${this.plan.title}: ${told.join(", ")}`);
    }

    build() {
      const axis = { stroke: () => variable("--muted"), grid: { stroke: () => variable("--line"), width: 1 }, ticks: { show: false }, font: `11.5px ${variable("--sans")}` };
      this.box.setAttribute("role", "img");
      this.box.setAttribute("aria-label", this.plan.title);
      this.plot = new uPlot({
        ...this.size(),
        legend: { show: false },
        tzDate: (seconds) => (cachesvc.isUtc ? uPlot.tzDate(new Date(seconds * 1e3), "Etc/UTC") : new Date(seconds * 1e3)),
        padding: [8, 26, 0, 0],
        cursor: { sync: { key: sync.key }, drag: { x: false, y: false }, points: { size: 6 } },
        scales: {
          x: { range: () => { const end = this.times.at(-1) || Date.now() / 1000; return [Math.max(end - (this.window_s || 900), Math.min(this.times[0] ?? 0, end - 10)), end]; } }, // no further than the samples
          y: { range: (plot, low, high) => [Math.min(0, low || 0), high > 0 ? high * 1.08 : 1] },
        },
        axes: [
          { ...axis, size: (plot, values) => (values?.some((text) => text?.includes("\n")) ? 36 : 22), gap: 6, space: 70, values: [[3600 * 24, "{DD} {MMM}", null, null, null, null, null, null, 1], [60, "{HH}:{mm}", null, null, "\n{DD} {MMM}", null, null, null, 1], [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]] },
          { ...axis, size: 62, space: 30, ...(this.plan.unit.startsWith("B") ? { incrs: BINARY } : {}), values: (plot, ticks) => ticks.map((tick) => cachesvc.tick(tick, this.plan.unit)) },
        ],
        series: [{}, ...this.lines.map(([label, name]) => ({
          label,
          stroke: () => colour(name),
          fill: this.plan.stack ? () => colour(name) : undefined,
          width: this.plan.stack ? 0 : 1.5,
          spanGaps: false,
          points: { show: !this.plan.stack, filter: lonely, size: 4, fill: () => colour(name) },
        }))],
        hooks: { setCursor: [(plot) => this.tell(plot.cursor.idx)] },
      }, [this.times, ...this.lines.map(() => [])], this.box);
      sync.sub(this.plot);
    }

    redraw() {
      this.plot.redraw(false, true);
    }
  }

  cachesvc.Chart = Chart;
})();
