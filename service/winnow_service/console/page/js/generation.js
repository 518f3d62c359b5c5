/** One request that generates, streamed, and timed where its user is. */

import { createParser } from "../vendor/eventsource-parser/index.js";
import { Problem, ask, lost } from "./api.js";

const ROUTES = { chat: "v1/chat/completions", text: "v1/completions" };

/** What has come of a request so far. */
export class Generation {
  text = "";
  /** Seconds from sending to the first text; null before. */
  ttft = null;
  usage = null;
  /** What the answer reports of its attention. */
  attention = null;
  finishReason = null;
  #started = performance.now();
  #last = null;

  /** Seconds from one token to the next, after the first; null as long as it is not known. */
  get tpot() {
    const following = (this.usage?.completion_tokens ?? 0) - 1;
    return this.ttft === null || following < 1 ? null : (this.#last - this.ttft) / following;
  }

  /** Take an event's data. */
  take(data) {
    if (data.error) throw Problem.of(data, null);
    const choice = data.choices?.[0];
    const said = (choice?.delta?.reasoning_content ?? "") + (choice?.delta?.content ?? choice?.text ?? "");
    if (said !== "") {
      this.#last = (performance.now() - this.#started) / 1000;
      this.ttft ??= this.#last;
      this.text += said;
    }
    this.finishReason = choice?.finish_reason ?? this.finishReason;
    this.usage = data.usage ?? this.usage;
    const attention = data.attention ?? choice?.attention;
    this.attention = (Array.isArray(attention) ? attention[0] : attention) ?? this.attention;
  }
}

/**
 * Send a request and follow its answer.
 *
 * @param asked `form` ("chat" or "text"), `model`, `prompt`, `maxTokens`, `temperature` and `attention`, each but the
 *   form and the prompt possibly undefined: then the service decides.
 * @param follow called with the Generation whenever something has come.
 * @throws Problem, with what had come before it shown by `follow`; AbortError if `signal` was given.
 */
export async function generate(asked, follow, signal) {
  const generation = new Generation();
  const answer = await ask(ROUTES[asked.form], { method: "POST", body: bodyOf(asked), signal });
  const parser = createParser({
    onEvent: ({ data }) => {
      if (data !== "[DONE]") generation.take(JSON.parse(data));
    },
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw lost(error, "The connection to the service was lost before the answer was complete.");
      });
      if (done) return generation;
      parser.feed(value);
      follow(generation);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function bodyOf({ form, model, prompt, maxTokens, temperature, attention }) {
  const said = form === "chat" ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  return {
    model,
    ...said,
    max_tokens: maxTokens,
    temperature,
    stream: true,
    stream_options: { include_usage: true },
    attention,
  };
}
