// A classic script in the head: the chosen theme stands before anything is drawn.
(() => {
  const chosen = localStorage.getItem("winnow.theme");
  if (chosen === "light" || chosen === "dark") {
    document.documentElement.dataset.theme = chosen;
  }
})();
