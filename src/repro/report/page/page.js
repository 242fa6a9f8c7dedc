// Filters of the verdict table, whose state stands in the address: #verdicts?paper=ZT&agreement=deviates
"use strict";
(() => {
  const form = document.getElementById("filter");
  const shown = document.getElementById("shown");
  const claims = [...document.querySelectorAll("tbody[data-paper]")];
  const sections = [...document.querySelectorAll("section.verdicts")];
  const fields = ["paper", "agreement", "scope", "kind", "text"];
  const texts = new Map(claims.map((claim) =>
    [claim, [...claim.querySelectorAll(".claim, .says")].map((part) => part.textContent).join(" ").toLowerCase()]));

  function passes(claim) {
    const { paper, agreement, scope, kind } = claim.dataset;
    const is = { paper, agreement, scope };
    return Object.keys(is).every((name) => !form[name].value || form[name].value === is[name])
      && (!form.kind.value || kind.split(" ").includes(form.kind.value))
      && form.text.value.toLowerCase().split(/\s+/).every((word) => texts.get(claim).includes(word));
  }

  function filter() {
    let count = 0;
    for (const claim of claims) {
      claim.hidden = !passes(claim);
      count += !claim.hidden;
    }
    for (const section of sections) {
      section.hidden = !section.querySelector("tbody[data-paper]:not([hidden])");
    }
    shown.textContent = count === claims.length ? `${count} rows.` : `${count} of ${claims.length} rows.`;
  }

  function remember() {
    const said = new URLSearchParams(fields.filter((name) => form[name].value).map((name) => [name, form[name].value]));
    history.replaceState(null, "", said.size ? `#verdicts?${said}` : "#verdicts");
  }

  function clear() {
    for (const name of fields) form[name].value = "";
    filter();
  }

  // Goes where the address points: to a filtered table, or to a place, which is opened and not left hidden by a filter.
  function go() {
    const [place, said] = location.hash.slice(1).split("?");
    const target = document.getElementById(decodeURIComponent(place));
    if (said !== undefined) {
      const asked = new URLSearchParams(said);
      for (const name of fields) form[name].value = asked.get(name) || "";
      filter();
      target?.focus({ preventScroll: true });
    } else if (target?.closest("[hidden]")) {
      clear();
    }
    if (target?.matches("tbody")) target.querySelector("details").open = true;
    target?.scrollIntoView();
  }

  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => { filter(); remember(); });
  form.addEventListener("reset", (event) => { event.preventDefault(); clear(); remember(); });
  addEventListener("hashchange", go);
  for (const link of document.querySelectorAll('a[href^="#"]')) {
    link.addEventListener("click", () => { if (link.getAttribute("href") === location.hash) go(); });
  }

  // A click anywhere on a row opens it, as its line below does.
  for (const claim of claims) {
    claim.querySelector(".claim").addEventListener("click", () => {
      const more = claim.querySelector("details");
      if (!String(getSelection())) more.open = !more.open;
    });
  }

  // Contents stand open beside a wide page.
  const contents = document.querySelector("nav details");
  const wide = matchMedia("(min-width: 72rem)");
  const fit = () => { contents.open = wide.matches; };
  wide.addEventListener("change", fit);
  fit();
  contents.addEventListener("click", (event) => { if (event.target.matches("a") && !wide.matches) contents.open = false; });

  // What scrolls can be reached by keyboard; what does not is no stop on the way.
  const boxes = [...document.querySelectorAll(".box")];
  const sizes = new ResizeObserver((seen) => {
    for (const { target } of seen) {
      if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
      else target.removeAttribute("tabindex");
    }
  });
  for (const box of boxes) sizes.observe(box);

  // Paper cannot be opened.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("main details:not([open])")];
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => { for (const one of closed) one.open = false; });

  filter();
  if (location.hash) go();
})();
