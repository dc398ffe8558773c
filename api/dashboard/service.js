/* The service as this page knows it: calls, problems, the token. */

const KEY = "asyncdock.token"; // a token that was typed: of this tab. The session of a link: of all tabs, until the server ends.
const SESSION = "adock-session_";

/** An answer other than success: RFC 9457, with the field, its value and the fix where there is one. */
export class Problem extends Error {
  constructor(status, body = {}) {
    super(body.detail || body.title || (status ? `The server answered ${status}.` : "The server cannot be reached."));
    this.status = status;
    this.title = body.title || "";
    this.errors = (body.errors?.length ? body.errors : body.field ? [body] : []).map((one) => ({
      field: String(one.field ?? ""),
      value: one.value,
      wrong: String(one.wrong ?? one.detail ?? ""),
      fix: String(one.fix ?? ""),
    }));
    this.fix = body.errors?.length ? "" : String(body.fix ?? "");
  }
}

export class Service {
  /** `onUnauthorized` is called when the server wants a (better) token. */
  constructor(onUnauthorized) {
    this.onUnauthorized = onUnauthorized;
    this.skew = 0; // seconds by which the server's clock is ahead of this one's
  }

  get now() {
    return Date.now() / 1000 + this.skew;
  }

  get token() {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
  }

  set token(token) {
    for (const storage of [sessionStorage, localStorage]) storage.removeItem(KEY);
    if (token) (token.startsWith(SESSION) ? localStorage : sessionStorage).setItem(KEY, token);
  }

  get bySession() {
    return this.token.startsWith(SESSION);
  }

  /** Sign in with the code of a link, which works once. */
  async signIn(code) {
    this.token = (await this.json("v1/login", { method: "POST", body: { code }, isSigningIn: true })).token;
  }

  /** Sign out. The server forgets a session; where it does not answer, the session ends by its time. */
  async signOut() {
    if (this.bySession) await this.json("v1/login", { method: "DELETE", isSigningIn: true }).catch(() => {});
    this.token = "";
  }

  /** The response of a call that succeeded; raises Problem for any other. `path` has no leading slash. */
  async fetch(path, { method = "GET", query = {}, body, headers = {}, signal, isSigningIn = false } = {}) {
    const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value != null));
    const url = `${path}${asked.size ? `?${asked}` : ""}`;
    const sent = { Accept: "application/json", ...headers };
    const { token } = this;
    if (token) sent.Authorization = `Bearer ${token}`;
    if (body !== undefined) sent["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(url, {
        method,
        headers: sent,
        signal,
        body: body === undefined ? undefined : JSON.stringify(body),
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem(0);
    }
    const date = Date.parse(response.headers.get("Date"));
    if (Number.isFinite(date)) this.skew = Math.abs(date - Date.now()) < 2000 ? 0 : (date - Date.now()) / 1000;
    if (response.ok) return response;
    const problem = await response.json().catch(() => ({}));
    // A late answer says nothing of a token that was given since.
    if (response.status === 401 && !isSigningIn && token === this.token) this.onUnauthorized();
    throw new Problem(response.status, problem);
  }

  async json(path, options) {
    const response = await this.fetch(path, options);
    return response.status === 204 ? null : response.json();
  }

  run(id, path = "", options) {
    return this.json(`v1/runs/${encodeURIComponent(id)}${path}`, options);
  }
}
