// What every page has: the theme, the keyboard, the list of shortcuts.
"use strict";

window.cachesvc = window.cachesvc || {};

(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const shortcuts = document.getElementById("shortcuts");

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  }

  function toggleTheme() {
    const theme = isDark() ? "light" : "dark";
    root.dataset.theme = theme;
    document.cookie = `cachesvc_theme=${theme}; path=/admin; max-age=31536000; SameSite=Strict`;
    document.dispatchEvent(new Event("themechange"));
  }

  // One zone for tables and charts: the reader's own, or UTC. Without this script a page is in UTC.
  const own = new Date().toLocaleTimeString("en", { timeZoneName: "short" }).split(" ").at(-1);
  window.cachesvc.isUtc = localStorage.getItem("cachesvc_zone") === "utc" || own === "UTC";
  const zone = window.cachesvc.isUtc ? "UTC" : own;

  function showTimes(inside) {
    for (const each of inside.querySelectorAll(".zone")) each.textContent = zone;
    if (window.cachesvc.isUtc) return;
    for (const each of inside.querySelectorAll("time[datetime]")) {
      const when = new Date(each.dateTime);
      // Swedish writes times as ISO 8601 does.
      each.textContent = when.toLocaleString("sv");
      each.title = `${each.dateTime.replace("T", " ").replace("Z", "")} UTC`;
    }
  }

  function toggleZone() {
    localStorage.setItem("cachesvc_zone", window.cachesvc.isUtc ? "own" : "utc");
    location.reload();
  }

  document.getElementById("zone").textContent = zone;
  showTimes(document);
  document.addEventListener("htmx:afterSwap", (event) => showTimes(event.target));

  // A refused form comes back as it was typed: browsers keep nothing of a page with `no-store`.
  const TYPED = "cachesvc_typed";
  document.addEventListener("submit", ({ target }) => {
    if (target.method !== "post") return;
    const fields = [...new FormData(target)].filter(([name]) => name !== "csrf_token");
    sessionStorage.setItem(TYPED, JSON.stringify([location.pathname, target.getAttribute("action"), fields]));
  });
  if (performance.getEntriesByType("navigation")[0]?.type === "back_forward") {
    const [path, action, fields] = JSON.parse(sessionStorage.getItem(TYPED) || "[]");
    const form = [...document.forms].find((each) => each.getAttribute("action") === action);
    if (form && path === location.pathname) {
      for (const [name, text] of fields) {
        if (form.elements[name] && form.elements[name].type !== "checkbox") form.elements[name].value = text;
      }
      form.closest("details")?.setAttribute("open", "");
    }
  }

  let went = -Infinity; // when `g` was pressed

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || shortcuts.open) return;
    if (event.target.closest("input:not([type=radio]), textarea, select")) return;
    const key = event.key;
    if (key === "g") { went = event.timeStamp; return; }
    if (event.timeStamp - went < 1500) {
      const link = [...document.querySelectorAll("a[data-key]")].find((a) => a.dataset.key === key);
      went = -Infinity;
      if (link) { event.preventDefault(); link.click(); }
      return;
    }
    if (key === "t") toggleTheme();
    else if (key === "z") toggleZone();
    else if (key === "?") shortcuts.showModal();
    else if (key === "p") document.getElementById("pause")?.click();
    else if (/^[1-9]$/.test(key)) document.querySelectorAll("input[name=window]")[Number(key) - 1]?.click();
  }

  document.getElementById("zone").addEventListener("click", toggleZone);
  document.getElementById("theme").addEventListener("click", toggleTheme);
  document.getElementById("keys").addEventListener("click", () => shortcuts.showModal());
  document.addEventListener("keydown", onKey);
  dark.addEventListener("change", () => document.dispatchEvent(new Event("themechange")));
})();
