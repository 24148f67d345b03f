// Before the first paint: the theme that was chosen. A classic script, because modules run after it.
(() => {
  try {
    const chosen = localStorage.getItem("kvtier-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // No storage: the system's theme.
  }
})();
