// The page: what its parts have in common, which are the composer, the two views, the theme and the problems.

import { Chat } from "./chat.ts";
import { byId } from "./dom.ts";
import { Inspector } from "./inspector.ts";
import { Race } from "./race.ts";
import { Problem, Server } from "./server.ts";
import { Settings } from "./settings.ts";

type View = "chat" | "race";

const VIEWS: readonly View[] = ["chat", "race"];
const THEME = "foreword-theme";

const composer = byId("composer", HTMLFormElement);
const prompt = byId("prompt", HTMLTextAreaElement);
const send = byId("send", HTMLButtonElement);
const stop = byId("stop", HTMLButtonElement);
const fresh = byId("new", HTMLButtonElement);
const problem = byId("problem", HTMLElement);

const server = new Server();
const settings = new Settings(server, showMethod, fail);
const inspector = new Inspector();
const chat = new Chat(server, settings, inspector);
const race = new Race(server, settings, inspector);

let view: View = "chat";
let running: AbortController | null = null;

async function submit(): Promise<void> {
  const text = prompt.value.trim();
  if (!text || running) return;
  running = new AbortController();
  problem.textContent = "";
  showState();
  try {
    await connect(); // the method may have been switched elsewhere
    if (view === "chat") {
      prompt.value = "";
      await chat.send(text, running.signal);
    } else {
      await race.run(text, running.signal);
    }
  } catch (error) {
    fail(error);
    prompt.value ||= text;
  } finally {
    running = null;
    showState();
  }
}

/** Read what the server serves. */
async function connect(): Promise<void> {
  byId("model", HTMLElement).textContent = await server.model();
  await settings.load();
}

function fail(error: unknown): void {
  if (!(error instanceof Problem)) console.error(error);
  problem.textContent = error instanceof Problem ? error.message : "The page failed. Its console says why; reload it.";
  if (error instanceof Problem && error.aboutKey) settings.askForKey();
}

function showMethod(): void {
  byId("served-method", HTMLElement).textContent = settings.method;
}

function showState(): void {
  const isRunning = running !== null;
  const focused = document.activeElement;
  send.disabled = isRunning;
  stop.disabled = !isRunning;
  if (focused === send && isRunning) stop.focus(); // a disabled button would lose the focus of the keyboard
  if (focused === stop && !isRunning) prompt.focus();
  fresh.disabled = isRunning;
  composer.setAttribute("aria-busy", String(isRunning));
}

function showView(next: View): void {
  view = next;
  for (const name of VIEWS) {
    const tab = byId(`${name}-tab`, HTMLButtonElement);
    tab.setAttribute("aria-selected", String(name === next));
    tab.tabIndex = name === next ? 0 : -1;
    byId(name, HTMLElement).hidden = name !== next;
  }
  send.textContent = next === "chat" ? "Send" : "Race";
  fresh.hidden = next === "race";
  byId("order", HTMLElement).hidden = next === "chat";
}

function watchTabs(): void {
  for (const name of VIEWS) {
    const tab = byId(`${name}-tab`, HTMLButtonElement);
    tab.addEventListener("click", () => showView(name));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = name === "chat" ? "race" : "chat";
      showView(other);
      byId(`${other}-tab`, HTMLButtonElement).focus();
    });
  }
}

function watchComposer(): void {
  composer.addEventListener("submit", (event) => {
    event.preventDefault();
    void submit();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    void submit();
  });
  stop.addEventListener("click", () => running?.abort());
  fresh.addEventListener("click", () => {
    chat.clear();
    prompt.focus();
  });
  for (const button of document.querySelectorAll<HTMLButtonElement>("button.example")) {
    button.addEventListener("click", () => {
      prompt.value = button.textContent ?? "";
      prompt.focus();
    });
  }
  byId("key", HTMLInputElement).addEventListener("change", () => {
    problem.textContent = "";
    connect().catch(fail);
  });
}

function watchTheme(): void {
  const button = byId("theme", HTMLButtonElement);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const current = (): string => document.documentElement.dataset["theme"] ?? (dark.matches ? "dark" : "light");
  const show = (): void => {
    const isDark = current() === "dark";
    button.textContent = isDark ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark ? "Use the light theme" : "Use the dark theme");
  };
  const kept = localStorage.getItem(THEME);
  if (kept === "dark" || kept === "light") document.documentElement.dataset["theme"] = kept;
  button.addEventListener("click", () => {
    const theme = current() === "dark" ? "light" : "dark";
    document.documentElement.dataset["theme"] = theme;
    localStorage.setItem(THEME, theme);
    show();
  });
  dark.addEventListener("change", show);
  show();
}

function watchTints(): void {
  const button = byId("tints", HTMLButtonElement);
  button.addEventListener("click", () => {
    const isOn = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(isOn));
    document.body.classList.toggle("untinted", !isOn);
  });
}

watchTabs();
watchComposer();
watchTheme();
watchTints();
showView("chat");
showState();
connect().catch(fail);
