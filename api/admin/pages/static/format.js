// Numbers for people: three digits, a unit, and the same width whatever the value.
"use strict";

window.cachesvc = window.cachesvc || {};

(() => {
  const SMALL = [[1e-3, 1e6, "µs"], [1, 1e3, "ms"], [120, 1, "s"], [7200, 1 / 60, "min"], [172800, 1 / 3600, "h"], [Infinity, 1 / 86400, "d"]];
  const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const COUNT = ["", "k", "M", "G", "T"];

  // Three significant digits, without an exponent: 0.0123, 4.56, 78.9, 123.
  function digits(value) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    const places = size >= 99.95 ? 0 : Math.min(8, 2 - Math.floor(Math.log10(size)));
    const text = value.toFixed(places);
    return Number.isInteger(value) ? String(value) : text;
  }

  function scaled(value, base, names) {
    let power = 0;
    while (Math.abs(value) >= base * 0.9995 && power < names.length - 1) { value /= base; power += 1; }
    return digits(power ? Number(value.toPrecision(3)) : value) + (names[power] ? " " + names[power] : "");
  }

  function seconds(value) {
    if (value === 0) return "0 s";
    const [, factor, unit] = SMALL.find(([bound]) => Math.abs(value) < bound);
    return digits(Number((value * factor).toPrecision(3))) + " " + unit;
  }

  // `unit`: s, B, B/s, /s, %, x, money, or nothing for a count. Null is what nobody measured.
  cachesvc.format = (value, unit) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    switch (unit) {
      case "s": return seconds(value);
      case "B": return scaled(value, 1024, BYTES);
      case "B/s": return scaled(value, 1024, BYTES) + "/s";
      case "%": return (100 * value).toFixed(1) + " %";
      case "x": return digits(Number(value.toPrecision(3))) + " ×";
      case "money": return value === 0 ? "0" : digits(Number(value.toPrecision(3)));
      case "/s": return scaled(Number(value.toPrecision(3)), 1000, COUNT) + "/s";
      default: return scaled(Number(value.toPrecision(3)), 1000, COUNT);
    }
  };

  // The same beside an axis, without zeros at the end.
  cachesvc.tick = (value, unit) => cachesvc.format(value, unit).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
})();
