/* The page: which view is shown, who is signed in, whether the events come.
 *
 *    #/ ──▶ the newest run (where there is room; a phone shows the list)    #/new ──▶ the form    #/runs/ID ──▶ that run
 *    #/table/COLUMNS&… ──▶ all runs as a table    #/compare/runs=…&… ──▶ curves of several runs over each other
 *    #/runs/ID/continue, #/runs/ID/fork ──▶ the form that begins with one of its checkpoints, /VERSION that one
 *    #/models ──▶ what clients train, where the server has training calls (the first page, where it has no run)    #/models/ID ──▶ one
 *    #login=CODE ──▶ the session of a link, which works once
 */

import { announce, element, say } from "./element.js";
import { ComparePage } from "./pages/compare.js";
import { loadWords } from "./format.js";
import { ModelPage, ModelsPage } from "./pages/models.js";
import { RunPage } from "./pages/run.js";
import { Runs } from "./pages/runs.js";
import { Service } from "./service.js";
import { Again, Start } from "./pages/start.js";
import { TablePage } from "./pages/table.js";

const CONNECTION = { connecting: "Connecting…", live: "Live", waiting: "Connecting again…", ended: "Ended", refused: "Not connected" };
const CODE = /^#login=([\w-]+)$/; // of a link that signs in
const MANY = "(min-width: 900px)"; // list and run beside each other

class App {
  constructor() {
    this.main = document.getElementById("main");
    this.connection = document.getElementById("connection");
    this.out = document.getElementById("sign-out");
    this.models = document.getElementById("models");
    this.newRun = document.getElementById("new-run");
    this.runsOf = "service";
    this.service = new Service(() => this.signIn());
    this.runs = new Runs(this.service, (runs, filtered) => this.listed(runs, filtered));
    this.page = null;
    this.turn = 0;
    this.out.addEventListener("click", () => this.signOut());
    // "#main" would be a place to go to for the router.
    document.getElementById("skip").addEventListener("click", (event) => {
      event.preventDefault();
      (this.main.querySelector("h1") ?? this.main).focus();
    });
    window.addEventListener("hashchange", () => (CODE.test(location.hash) ? this.begin() : this.go(true)));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.page?.restyle?.());
    matchMedia(MANY).addEventListener("change", () => this.go(false));
  }

  async begin() {
    const [, code] = CODE.exec(location.hash) ?? [];
    if (code) {
      history.replaceState(null, "", "#/"); // a reload does not ask again
      try {
        await this.service.signIn(code);
      } catch (problem) {
        if (!this.service.token) return this.signIn(problem);
        history.replaceState(null, "", "#/link");
        this.put({ element: notice("This link does not sign in", `${problem.message} This browser is signed in already.`) });
        return this.runs.load(); // which asks for a token where that has ended
      }
    }
    this.out.hidden = !this.service.token;
    const [known] = await Promise.all([this.look(), loadWords().catch(() => {})]); // without words, names are shown
    if (!known) return;
    if (this.runsOf !== "none") this.runs.load();
    this.go(false);
  }

  /** Ask what the server has. Returns false where nobody is signed in. */
  async look() {
    const server = await this.service.json("v1/server").catch((problem) => problem);
    if (server.status === 401) return false;
    this.models.hidden = !server.models;
    this.runsOf = server.runs_of ?? "service";
    this.newRun.hidden = this.runsOf !== "service";
    document.body.dataset.runs = this.runsOf;
    return true;
  }

  /** Show what the address says; `moved` when a person went there, who then reads on at its heading. */
  async go(moved) {
    const turn = (this.turn += 1);
    const [begin, what = "", id = "", how = "", version = ""] = location.hash.split("/");
    if (what === "runs" && !id) return location.replace("#/");
    if (!what && this.runsOf === "none") return location.replace("#/models");
    const run = what === "runs" ? decodeURIComponent(id) : "";
    this.put(null);
    this.runs.choose(run);
    document.body.dataset.view = how || what || "home";
    document.title = "AsyncDock";
    try {
      if (what === "new") {
        const start = new Start(this.service, (record) => this.started(record));
        this.put(start);
        await start.load();
      } else if (what === "models") {
        const onConnection = (state, detail) => this.connected(state, detail);
        const page = id ? new ModelPage(this.service, decodeURIComponent(id), onConnection) : new ModelsPage(this.service, onConnection);
        this.put(page);
        await page.load();
      } else if (what === "table" || what === "compare") {
        const page = new (what === "table" ? TablePage : ComparePage)(this.service, new URLSearchParams(id));
        this.put(page);
        page.load();
      } else if (run) {
        const record = await this.service.run(run);
        if (turn !== this.turn) return;
        if (how === "continue" || how === "fork") {
          const again = new Again(this.service, record, how, version, (started) => this.started(started));
          this.put(again);
          document.title = `${again.title.textContent} – AsyncDock`;
          return await again.load();
        }
        const page = new RunPage(this.service, record, {
          onConnection: (state, detail) => this.connected(state, detail),
          onGone: () => this.left(),
        });
        this.put(page);
        page.load();
      } else if (what || !["", "#"].includes(begin)) {
        this.put({ element: notice("Nothing is here", `The address ${location.hash} is of no page.`), title: null });
      }
    } catch (problem) {
      if (turn === this.turn && problem.status !== 401) this.put({ element: notice("This run cannot be shown", problem.message), title: null });
    }
    if (moved && turn === this.turn) {
      (this.main.querySelector("h1") ?? this.main).focus();
      window.scrollTo(0, 0);
    }
  }

  put(page) {
    this.page?.destroy?.();
    this.page = page;
    this.main.replaceChildren(page ? page.element : element("h1", { class: "hidden", tabindex: "-1" }, "Runs of this service"));
  }

  listed(runs, filtered) {
    if (location.hash && location.hash !== "#/") return;
    if (runs.length && matchMedia(MANY).matches) location.replace(`#/runs/${encodeURIComponent(runs[0].id)}`);
    else if (!runs.length && !filtered && !this.models.hidden) location.replace("#/models");
    else if (!runs.length && !filtered && !this.page) this.put({ element: welcome() });
    else if (runs.length && this.page) this.put(null);
  }

  started(record) {
    announce(`Run ${record.name} was submitted.`);
    this.runs.load();
    location.hash = `#/runs/${encodeURIComponent(record.id)}`;
  }

  left() {
    this.runs.load();
    location.hash = "#/";
  }

  connected(state, detail) {
    this.connection.className = `connection ${state}`;
    say(this.connection, CONNECTION[state] ?? "");
    this.connection.title = detail;
  }

  // ── the token ──

  /** The form for a token. `problem`: why a link did not do. */
  signIn(problem = null) {
    if (this.main.querySelector("#token") && !problem) return;
    const refused = this.service.bySession ? "This sign-in has ended: the server was started anew, or the token was revoked." : "The server does not accept this token.";
    const why = problem ? problem.message : this.service.token && refused;
    this.service.token = "";
    this.out.hidden = this.newRun.hidden = true;
    this.runs.stop();
    this.turn += 1;
    const input = element("input", { id: "token", type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "token-says" });
    const form = element(
      "form",
      {
        class: "card sign-in",
        on: {
          submit: (event) => {
            event.preventDefault();
            this.service.token = input.value.trim().replace(/^tml-/, ""); // a key of Tinker's clients is a token
            this.put(null);
            this.begin();
          },
        },
      },
      element("h1", { tabindex: "-1" }, "Sign in"),
      why ? element("p", { class: "wrong", role: "alert" }, why) : null,
      element("p", {}, "Where you run the service, ", element("code", {}, "asyncdock link"), " prints a link that signs this browser in."),
      element("p", { id: "token-says", class: "quiet" }, "Or give a token, which its operator makes with ", element("code", {}, "asyncdock token create"), ". It is kept until this tab is closed."),
      element("label", { class: "field", for: "token" }, element("span", {}, "Token"), input),
      element("div", { class: "buttons" }, element("button", { type: "submit", class: "primary" }, "Sign in")),
    );
    document.body.dataset.view = "sign-in";
    this.put({ element: element("div", { class: "page narrow" }, form) });
    input.focus();
  }

  async signOut() {
    await this.service.signOut();
    this.runs.show([], "", false);
    this.begin();
  }
}

function notice(title, text) {
  return element("div", { class: "page narrow" }, element("div", { class: "card" }, element("h1", { tabindex: "-1" }, title), element("p", {}, text), element("p", {}, element("a", { href: "#/" }, "All runs"))));
}

function welcome() {
  return element(
    "div",
    { class: "page narrow" },
    element(
      "div",
      { class: "card" },
      element("h1", { tabindex: "-1" }, "No run yet"),
      element("p", {}, "A run trains a model by a recipe. The one called mock needs no model and shows all of this in seconds."),
      element("p", {}, element("a", { class: "button primary", href: "#/new" }, "New run")),
      element("p", { class: "quiet" }, "or from a shell:"),
      element("pre", {}, `asyncdock runs start mock --server ${location.origin}`),
    ),
  );
}

new App().begin();
