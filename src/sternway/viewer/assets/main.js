"use strict";
// Tabs, theme and keys. When the first tab is drawn, the page says so, with the time it took since it was asked for.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement, main = document.getElementById("main"), tabs = document.getElementById("tabs");
  root.dataset.theme = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.getElementById("title").textContent = data.title;
  const views = [];
  if (data.graph) views.push(["Graph", new GraphView(data)]);
  if (data.sections.length) views.push(["Report", new ReportView(data.sections)]);
  let on = null;
  const started = new Set();
  const show = (view) => {
    on = view;
    for (const [, each] of views) {
      each.element.classList.toggle("on", each === view);
      each.tab.setAttribute("aria-selected", String(each === view));
    }
    if (!started.has(view)) { started.add(view); view.start(); }
  };
  for (const [name, view] of views) {
    view.element.setAttribute("role", views.length > 1 ? "tabpanel" : "presentation");
    view.element.setAttribute("aria-label", name);
    view.tab = make("button", { type: "button", role: "tab", "aria-controls": view.element.id, onclick: () => show(view) }, name);
    tabs.append(view.tab);
    main.append(view.element);
  }
  if (views.length < 2) { tabs.remove(); views.forEach(([, view]) => view.element.removeAttribute("role") || view.element.removeAttribute("aria-label")); }
  show(views[0][1]);
  const turn = () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    if (views[0][1].picture) views[0][1].picture.draw();
  };
  document.getElementById("theme").addEventListener("click", turn);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = ["INPUT", "SELECT"].includes(event.target.tagName);
    if (typing && event.key !== "Escape") return;
    if (typing) event.target.blur();
    if (event.target.tagName === "BUTTON" && (event.key === "Enter" || event.key === " ")) return;
    if (event.key === "t") turn();
    else if (!on.key(event)) return;
    event.preventDefault();
  });
  window.sternway = { data, views: Object.fromEntries(views) };
  requestAnimationFrame(() => requestAnimationFrame(() => { root.dataset.ready = String(Math.round(performance.now())); }));
})();
