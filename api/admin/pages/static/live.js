// Keeps a page's numbers and charts fresh: one request for all of them, every second or few.
"use strict";

(() => {
  const charts = [...document.querySelectorAll("figure[data-chart]")].map((figure) => new cachesvc.Chart(figure));
  const outputs = [...document.querySelectorAll("output[data-over]")];
  const fills = [...document.querySelectorAll("[data-fill]")];
  const empties = [...document.querySelectorAll("[data-empty]")];
  const state = document.getElementById("state");
  const pause = document.getElementById("pause");
  const choices = [...document.querySelectorAll("input[name=window]")];
  const series = [...new Set(charts.flatMap((chart) => chart.queries))];
  const over = [...new Set([...outputs.flatMap((o) => (o.dataset.per ? [o.dataset.over, o.dataset.per] : [o.dataset.over])), ...fills.flatMap((f) => [f.dataset.fill, f.dataset.of]), ...empties.map((e) => e.dataset.empty)])];

  const alerts = document.querySelector("[data-alerts]");
  const ALERTS_S = 15;

  const POLL_S = 2; // no oftener than this, and twice for each new point
  let window_s = 900;
  let held = null; // what is drawn: {step_s, times, series}
  let timer = 0;
  let asked = 0; // the latest request's number; an answer to an older one is dropped

  async function ask(since_s) {
    const query = new URLSearchParams({ window_s, since_s });
    for (const each of series) query.append("series", each);
    for (const each of over) query.append("over", each);
    const response = await fetch(`/admin/api/history?${query}`, { headers: { Accept: "application/json" } });
    if (response.status === 401) location.assign(`/admin/login?next=${encodeURIComponent(location.pathname + location.search)}`);
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    return response.json();
  }

  // `fresh` after what is held; lines that just came up were nothing before.
  function joined(fresh) {
    const start = fresh.times.at(-1) - window_s;
    const drop = held.times.findIndex((time) => time > start);
    const times = held.times.slice(drop).concat(fresh.times);
    const names = new Set([...Object.keys(held.series), ...Object.keys(fresh.series)]);
    const columns = {};
    for (const name of names) {
      const before = held.series[name] || held.times.map(() => null);
      columns[name] = before.slice(drop).concat(fresh.series[name] || fresh.times.map(() => null));
    }
    return { ...fresh, times, series: columns };
  }

  function draw() {
    for (const chart of charts) {
      chart.adopt(Object.keys(held.series));
      chart.show(held.times, held.series, window_s);
    }
  }

  function valueOf(output, values) {
    const { over: name, per, scale } = output.dataset;
    const value = values[name];
    if (value === null || value === undefined || (per && !values[per])) return null;
    return (value * (scale || 1)) / (per ? values[per] : 1);
  }

  function tell(values) {
    for (const output of outputs) {
      const text = cachesvc.format(valueOf(output, values), output.dataset.unit);
      if (output.textContent !== text) output.textContent = text;
    }
    for (const fill of fills) {
      const share = Math.min(100, (100 * (values[fill.dataset.fill] || 0)) / (values[fill.dataset.of] || 1));
      fill.style.setProperty("--share", `${share}%`);
      fill.setAttribute("aria-valuenow", share.toFixed(1));
    }
    for (const empty of empties) empty.hidden = (values[empty.dataset.empty] || 0) > 0;
  }

  function say(kind, text) {
    state.className = `state ${kind}`;
    if (state.textContent !== text) state.textContent = text;
  }

  async function poll() {
    clearTimeout(timer);
    asked += 1;
    const number = asked;
    try {
      const answer = await ask(held ? held.times.at(-1) || 0 : 0);
      if (number !== asked) return;
      if (held && held.times.length && held.step_s !== answer.step_s) { held = null; return poll(); } // other points: all of them
      if (held && held.times.length) held = answer.times.length ? joined(answer) : held;
      else held = answer;
      draw();
      tell(answer.over);
      const held_s = held.times.at(-1) - held.times[0];
      say("live", held_s < 0.9 * window_s ? `live, of ${cachesvc.tick(held_s, "s")}` : "live"); // a young server
    } catch (error) {
      if (number !== asked) return;
      say("lost", "no answer, retrying");
    }
    const wait_s = Math.max(POLL_S, held ? Math.min(held.step_s / 2, 30) : 0);
    if (!paused() && !document.hidden) timer = setTimeout(poll, wait_s * 1000);
  }

  // What fires, as the page's template writes it.
  function showAlerts(firing) {
    alerts.hidden = firing.length === 0;
    alerts.querySelector("ul").replaceChildren(...firing.map((each) => {
      const item = document.createElement("li");
      const [name, note, runbook] = ["b", "small", "code"].map((tag) => document.createElement(tag));
      [name.textContent, name.className, runbook.textContent] = [each.alert, each.severity, each.runbook];
      note.append(`${each.severity} · `, runbook);
      item.append(name, ` ${each.summary} `, note);
      return item;
    }));
  }

  async function watchAlerts() {
    if (document.hidden || paused()) return;
    const response = await fetch("/admin/api/alerts", { headers: { Accept: "application/json" } }).catch(() => null);
    if (response?.ok) showAlerts(await response.json());
  }

  function paused() {
    return pause.getAttribute("aria-pressed") === "true";
  }

  function choose(value) {
    window_s = Number(value);
    held = null;
    const url = new URL(location);
    url.searchParams.set("window", value);
    history.replaceState(null, "", url);
    poll();
  }

  for (const choice of choices) choice.addEventListener("change", () => choose(choice.value));
  pause.addEventListener("click", () => {
    pause.setAttribute("aria-pressed", String(!paused()));
    if (paused()) { clearTimeout(timer); asked += 1; say("", "paused"); } else poll();
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden && !paused()) poll(); });
  document.addEventListener("themechange", () => charts.forEach((chart) => chart.redraw()));

  const wanted = choices.find((choice) => choice.value === new URL(location).searchParams.get("window"));
  if (alerts) setInterval(watchAlerts, ALERTS_S * 1000);
  if (wanted) { wanted.checked = true; window_s = Number(wanted.value); }
  poll();
})();
