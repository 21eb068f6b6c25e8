// The customer's page: reads /v1/usage* with the key that was typed in, which never leaves memory.
"use strict";

let key = "";
let currency = ""; // of the account
const money = (amount) => `${amount} ${currency}`;
const at = (id) => document.getElementById(id);

async function ask(path) {
  const answer = await fetch(path, { headers: { authorization: `Bearer ${key}` }, cache: "no-store" });
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Error(said.error?.message ?? `the server answered ${answer.status}`);
  }
  return answer;
}

const count = (value) => Number(value).toLocaleString("en");
const two = (number) => String(number).padStart(2, "0");
function moment(ns) {  // the reader's clock, in as few characters as say it
  const date = new Date(ns / 1e6);
  const day = [date.getFullYear(), two(date.getMonth() + 1), two(date.getDate())].join("-");
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

// Columns: title, what a row shows in it, and whether it is a number.
const USED = [
  ["Requests", (row) => count(row.requests), true],
  ["Prompt tokens", (row) => count(row.prompt_tokens), true],
  ["Of them hits", (row) => count(row.hit_tokens), true],
  ["Output tokens", (row) => count(row.output_tokens), true],
  ["Amount", (row) => `${row.amount} ${row.currency}`, true],
  ["Saved by the cache", (row) => `${row.saved} ${row.currency}`, true],
];
const TABLES = {
  daily: [["Day", (row) => row.period], ...USED],
  monthly: [["", (row) => row.part ?? ""], ...USED],
  sessions: [["Session", (row) => row.period], ...USED],
  grants: [
    ["Grant", (row) => row.reference],
    ["Until", (row) => (row.expires_ns ? moment(row.expires_ns) : "")],
    ["Given", (row) => money(row.amount), true],
    ["Left", (row) => money(row.left), true],
  ],
  limits: [
    ["Limit", (row) => row.name],
    ["Of", (row) => (row.value === "*" ? `each ${row.of}` : `${row.of} ${row.value}`)],
    ["Amount", (row) => `${money(row.amount)} a ${row.per}`, true],
    ["Spent", (row) => money(row.spent) + (row.highest && row.value === "*" ? ` by ${row.highest}` : ""), true],
    ["On hold", (row) => money(row.held), true],
    ["Left", (row) => money(row.left), true],
    ["Until", (row) => row.ends_at.replace("T", " ").replace(":00Z", " UTC")],
  ],
  entries: [
    ["When", (row) => moment(row.details.billed_ns ?? row.at_ns)],
    ["What", (row) => row.kind],
    ["Id", (row) => row.request_id],
    ["Model", (row) => row.details.model ?? row.details.reason ?? ""],
    ["Amount", (row) => `${row.amount} ${row.currency}`, true],
  ],
};

function cell(kind, text, isNumber) {
  const made = document.createElement(kind);
  made.append(text);
  if (isNumber) made.className = "n";
  return made;
}

function fill(name, rows) {
  const columns = TABLES[name];
  const head = document.createElement("tr");
  head.append(...columns.map(([title, , isNumber]) => cell("th", title, isNumber)));
  const lines = rows.map((row) => {
    const line = document.createElement("tr");
    line.append(...columns.map(([, show, isNumber]) => cell("td", show(row), isNumber)));
    return line;
  });
  if (!lines.length) lines.push(cell("caption", "Nothing yet."));
  at(name).replaceChildren(head, ...lines);
}

function monthPath() {
  const first = new Date().toISOString().slice(0, 8) + "01";
  const isTag = at("split").value === "tag:";
  at("tag").hidden = !isTag;
  const split = at("split").value + (isTag ? at("tag").value.trim() : "");
  return `/v1/usage?unit=month&since=${first}&breakdown=${encodeURIComponent(split)}`;
}

async function showMonth() {
  const path = monthPath();
  const isNamed = at("split").value !== "tag:" || at("tag").value.trim();
  fill("monthly", isNamed ? await (await ask(path)).json() : []);
}

async function show() {
  const account = await (await ask("/v1/usage/account")).json();
  at("tenant").textContent = account.tenant;
  currency = account.currency;
  const limit = account.credit_limit === null ? "unlimited" : account.credit_limit;
  const facts = [
    ["Balance", account.balance], ["Granted of it", account.granted],
    ["Owed", account.owed],
    ["On hold", account.held], ["Credit limit", limit], ["Available", account.available ?? "unlimited"],
  ].map(([name, value]) => [`${name}, ${account.currency}`, value]);
  at("limited").hidden = !account.spend_limits.length;
  fill("limits", account.spend_limits);
  at("granted").hidden = !account.grants.length;
  fill("grants", account.grants);
  at("balance").replaceChildren(...facts.map(([name, value]) => {
    const pair = document.createElement("div");
    pair.append(cell("dt", name), cell("dd", value));
    return pair;
  }));
  fill("daily", (await (await ask("/v1/usage?unit=day")).json()).reverse());
  fill("sessions", await (await ask("/v1/usage/sessions?limit=20")).json());
  fill("entries", await (await ask("/v1/usage/entries?limit=50")).json());
  await showMonth();
  at("shown").hidden = false;
}

async function tried(work) {
  at("wrong").textContent = "";
  try { await work(); } catch (error) { at("wrong").textContent = error.message; }
}

async function save(path, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await (await ask(path)).blob());
  if (name) link.download = name; else link.target = "_blank";
  link.click();
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  tried(show);
});
for (const id of ["split", "tag"]) at(id).addEventListener("change", () => tried(showMonth));
at("parts").addEventListener("click", () => tried(() => save(`${monthPath()}&format=csv`, "usage.csv")));
at("month").value = new Date().toISOString().slice(0, 7);
document.addEventListener("click", (event) => {
  const { csv, statement } = event.target.dataset ?? {};
  if (csv) tried(() => save(`${csv}${csv.includes("?") ? "&" : "?"}format=csv`, "usage.csv"));
  if (statement) {
    const month = at("month").value;
    const name = `statement-${month}.${statement}`;
    tried(() => save(`/v1/usage/statement/${month}?format=${statement}`, name));
  }
});
