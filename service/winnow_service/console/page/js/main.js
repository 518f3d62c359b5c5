/** The page: its tabs, and what stands above them. */

import { look } from "./access.js";
import { announce, fill, h } from "./dom.js";
import { installFigures } from "./figures.js";
import { PANELS } from "./panels.js";
import { session } from "./session.js";
import { installSignIn } from "./sign-in.js";
import { installThemeSwitch } from "./theme.js";
import { watch } from "./watch.js";

const main = document.getElementById("main");
const tabs = document.getElementById("tabs");
const mounted = new Map();

let current = null;

const app = {
  tryPolicy(name) {
    open("playground").choose(name);
    announce(`The playground has ${name} in its last column.`);
  },
  makePolicy(policy) {
    open("policies").make(policy);
  },
};

/** Go to a panel, and return it. */
function open(id) {
  show(PANELS.find((each) => each.id === id), true);
  location.hash = id;
  return mounted.get(id).panel;
}

function show({ id, title, mount }, isMove) {
  for (const { root } of mounted.values()) root.hidden = true;
  if (!mounted.has(id)) {
    const heading = h("h2", { tabindex: "-1", class: "unseen" }, title);
    const root = h("section", { class: "panel", id: `panel-${id}` }, heading);
    main.append(root);
    mounted.set(id, { root, heading, panel: mount(root, app) });
  }
  const { root, heading, panel } = mounted.get(id);
  current = id;
  root.hidden = false;
  panel.shown?.();
  document.title = `${title} · Winnow console`;
  for (const link of tabs.querySelectorAll("a")) {
    if (link.hash === `#${id}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (isMove) heading.focus({ preventScroll: true });
}

function route(isMove) {
  // Other fragments are places within the page, such as where the skip link goes.
  const named = PANELS.find(({ id }) => location.hash === `#${id}`);
  if ((named && named.id !== current) || mounted.size === 0) show(named ?? PANELS[0], isMove);
}

fill(tabs, h("ul", {}, ...PANELS.map(({ id, title }) => h("li", {}, h("a", { href: `#${id}` }, title)))));
installThemeSwitch(document.getElementById("theme"));
installFigures(document.getElementById("status"), document.getElementById("figures"), session);
installSignIn(document.getElementById("access"), document.getElementById("sign-in"));
addEventListener("hashchange", () => route(true));

// A service, or a runtime, that was away when this page came is asked again when it is back.
let wasReady = false;
watch.addEventListener("change", () => {
  const isReady = watch.ready?.ready ?? false;
  if (isReady && !wasReady && (session.mode === "unknown" || session.model === null)) look();
  wasReady = isReady;
});

route(false);
await look();
watch.start();
