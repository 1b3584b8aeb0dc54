"use strict";
// Shows one round of one prompt at a time. Everything is on the page already.
const prompts = [...document.querySelectorAll(".prompt")].filter((prompt) => prompt.querySelector(".round"));
const walk = document.querySelector(".walk");

if (walk && prompts.length) {
  const choice = document.getElementById("prompt");
  const slider = document.getElementById("slider");
  const place = document.getElementById("place");
  const previous = document.getElementById("previous");
  const next = document.getElementById("next");
  const rounds = prompts.map((prompt) => [...prompt.querySelectorAll(".round")]);
  const links = prompts.map((prompt) => [...prompt.querySelectorAll(".story a")]);
  let p = 0;
  let r = 0;

  const show = (newP, newR) => {
    rounds[p][r].classList.remove("now");
    prompts[p].classList.remove("now");
    p = Math.min(Math.max(newP, 0), prompts.length - 1);
    r = Math.min(Math.max(newR, 0), rounds[p].length - 1);
    prompts[p].classList.add("now");
    rounds[p][r].classList.add("now");
    links[p].forEach((link, i) => {
      link.className = i < r ? "past" : i === r ? "now" : "later";
      if (i === r) link.setAttribute("aria-current", "step");
      else link.removeAttribute("aria-current");
    });
    place.textContent = `round ${r + 1} of ${rounds[p].length}`;
    slider.max = rounds[p].length - 1;
    slider.value = r;
    previous.disabled = r === 0;
    next.disabled = r === rounds[p].length - 1;
    if (choice) choice.value = prompts[p].dataset.prompt;
    // keep the newest text in sight within its own box
    const story = links[p][r].parentElement;
    story.scrollTop = links[p][r].offsetTop - story.offsetTop - story.clientHeight / 2;
  };
  const step = (newP, newR) => {
    show(newP, newR);
    history.replaceState(null, "", `#${rounds[p][r].id}`); // the address leads back to this round
  };

  const obey = () => {
    const id = location.hash.slice(1);
    const newP = rounds.findIndex((own) => own.some((round) => round.id === id));
    if (newP >= 0) show(newP, rounds[newP].findIndex((round) => round.id === id));
  };

  previous.addEventListener("click", () => step(p, r - 1));
  next.addEventListener("click", () => step(p, r + 1));
  slider.addEventListener("input", () => step(p, Number(slider.value)));
  if (choice) {
    choice.addEventListener("change", () => {
      step(prompts.findIndex((prompt) => prompt.dataset.prompt === choice.value), 0);
    });
  }
  window.addEventListener("hashchange", obey);
  document.addEventListener("click", (event) => {
    const link = event.target.closest(".story a");
    if (!link) return;
    event.preventDefault(); // the page stays where it is
    step(p, Number(link.dataset.round));
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, .scroll, .story")) return; // they have keys of their own
    const steps = {
      ArrowLeft: [p, r - 1], ArrowRight: [p, r + 1], Home: [p, 0], End: [p, Infinity], p: [p - 1, 0], n: [p + 1, 0],
    };
    if (!(event.key in steps)) return;
    event.preventDefault();
    step(...steps[event.key]);
  });

  document.body.classList.add("live");
  walk.hidden = false;
  show(0, 0);
  obey();
}
