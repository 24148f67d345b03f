// Light, dark, or as the system has it.

const KEY = "kvtier-theme";

/** @returns {"system" | "light" | "dark"} */
export function theme() {
  return document.documentElement.dataset.theme ?? "system";
}

export function setTheme(chosen) {
  if (chosen === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  try {
    if (chosen === "system") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, chosen);
  } catch {
    // No storage: for this page only.
  }
}
