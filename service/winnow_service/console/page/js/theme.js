/** The switch between the system's theme, light and dark; what is drawn on a canvas is told to draw anew. */

const KEY = "winnow.theme";

/** Dispatches "change" when colours are others than before. */
export const theme = new EventTarget();

/** Make `select` the switch. */
export function installThemeSwitch(select) {
  select.value = document.documentElement.dataset.theme ?? "system";
  select.addEventListener("change", () => {
    if (select.value === "system") {
      delete document.documentElement.dataset.theme;
      localStorage.removeItem(KEY);
    } else {
      document.documentElement.dataset.theme = select.value;
      localStorage.setItem(KEY, select.value);
    }
    theme.dispatchEvent(new Event("change"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme.dispatchEvent(new Event("change")));
}

/** The colour that a custom property stands for now, as a canvas takes it. */
export function colour(property) {
  const probe = document.createElement("span");
  probe.hidden = true;
  probe.style.color = `var(${property})`;
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}
