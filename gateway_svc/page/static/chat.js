// The playground: chats whose requests can be followed through the engine.
import { stream } from "./api.js";
import { number, word, yours } from "./words.js";

const FOUR = ["Tell me a story about a fox.", "Count from 3 to 21.", "给我讲一个故事，主角是小猫", "What is continuous batching?"];

function seconds(value) {
  return value < 1 ? `${number(value * 1000)} ms` : `${number(value)} s`;
}

class Answer {
  constructor(place, prompt, count) {
    this.prompt = prompt;
    this.count = count;
    this.text = "";
    this.stopping = new AbortController();
    this.panel = document.createElement("article");
    this.panel.className = "answer";
    this.head = this.part("div", "head");
    this.you = document.createElement("p");
    this.you.className = "you";
    this.stop = document.createElement("button");
    this.stop.type = "button";
    this.stop.dataset.w = "stop";
    this.stop.textContent = word("stop");
    this.stop.addEventListener("click", () => this.stopping.abort());
    this.head.append(this.you, this.stop);
    this.body = this.part("p", "text");
    this.body.setAttribute("aria-live", "polite");
    this.facts = this.part("dl", "");
    this.steps = this.part("ol", "");
    this.tell();
    place.prepend(this.panel);
  }

  part(tag, className) {
    const element = document.createElement(tag);
    element.className = className;
    this.panel.append(element);
    return element;
  }

  on(event, names) {
    switch (event.type) {
      case "begin": names.set(event.request_id, this.count); break;
      case "text":
        this.text += event.text;
        this.body.textContent = this.text;
        break;
      case "journey": this.journey = event; this.tell(); break;
      case "end": this.end = event; this.tell(); break;
      case "error": this.fail(event.error.message); break;
    }
  }

  /** All of it that has words of the page's language. */
  tell() {
    const { journey, end } = this;
    this.you.textContent = `${yours(this.count)} · ${this.prompt}`;
    const facts = [];
    if (end?.total_s !== undefined) {
      facts.push(["waited", seconds(end.queue_s)], ["prefix", word("of_tokens", end.cached_tokens, end.prompt_tokens)]);
    }
    if (journey) facts.push(["steps", word("of_steps", number(journey.prefill_steps), number(journey.decode_steps))]);
    if (end?.total_s !== undefined) {
      facts.push(["preempted", word("times", end.preemptions)], ["first_token", seconds(end.first_token_s)]);
      facts.push(["total", word("of_total", seconds(end.total_s), number(end.output_tokens))]);
    }
    if (end) facts.push(["finish", end.finish]);
    this.facts.replaceChildren(...facts.flatMap(([name, value]) => {
      const [term, description] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = word(name);
      description.textContent = value;
      return [term, description];
    }));
    this.steps.replaceChildren(...(journey?.events ?? []).map(([, what, executor, step]) => {
      const item = document.createElement("li");
      item.className = what;
      item.textContent = word(`e_${what}`, executor, step);
      return item;
    }));
  }

  fail(message) {
    const problem = document.createElement("p");
    problem.className = "away";
    problem.setAttribute("role", "alert");
    problem.textContent = message;
    this.panel.append(problem);
  }
}

export class Chat {
  constructor({ form, answers, four, fresh, names }) {
    Object.assign(this, { form, answers, names, messages: [], shown: [], count: 0 });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    form.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    four.addEventListener("click", () => FOUR.forEach((prompt) => this.run(prompt, [{ role: "user", content: prompt }])));
    fresh.addEventListener("click", () => this.clear());
  }

  clear() {
    this.messages = [];
    this.shown = [];
    this.answers.replaceChildren();
    this.form.prompt.focus();
  }

  /** Write the answers in the other language. */
  translate() {
    for (const answer of this.shown) answer.tell();
  }

  async send() {
    const prompt = this.form.prompt.value.trim();
    if (!prompt) return;
    this.form.prompt.value = "";
    const messages = [...this.messages, { role: "user", content: prompt }];
    const answer = await this.run(prompt, messages);
    if (answer.text && answer.end) this.messages = [...messages, { role: "assistant", content: answer.text }];
  }

  async run(prompt, messages) {
    const answer = new Answer(this.answers, prompt, ++this.count);
    this.shown.push(answer);
    const body = {
      messages,
      max_tokens: Number(this.form.max_tokens.value),
    };
    if (this.form.temperature.value !== "") body.temperature = Number(this.form.temperature.value);
    try {
      await stream("page/chat", (event) => answer.on(event, this.names), { body, signal: answer.stopping.signal });
    } catch (error) {
      if (!answer.stopping.signal.aborted) answer.fail(error.message);
    }
    answer.stop.remove();
    return answer;
  }
}
