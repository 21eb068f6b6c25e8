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
    else if (key === "?") shortcuts.showModal();
    else if (key === "p") document.getElementById("pause")?.click();
    else if (/^[1-9]$/.test(key)) document.querySelectorAll("input[name=window]")[Number(key) - 1]?.click();
  }

  document.getElementById("theme").addEventListener("click", toggleTheme);
  document.getElementById("keys").addEventListener("click", () => shortcuts.showModal());
  document.addEventListener("keydown", onKey);
  dark.addEventListener("change", () => document.dispatchEvent(new Event("themechange")));
})();
