// Asks a server with Anthropic's SDK: a message whole and streamed, the count of its tokens, and an error.
import Anthropic from "@anthropic-ai/sdk";

const asked = JSON.parse(process.argv[2]);
const client = new Anthropic({ baseURL: asked.url, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: asked.question }];
// top_k 1 is greedy too; not every version of the SDK has a type for temperature.
const request = { model: asked.model, messages, max_tokens: asked.max_tokens, top_k: 1 };
const found = {};

const whole = await client.messages.create(request);
found.text = whole.content[0].text;
found.stop = whole.stop_reason;
found.usage = [whole.usage.input_tokens + whole.usage.cache_read_input_tokens, whole.usage.output_tokens];

const stream = client.messages.stream(request);
found.streamed = "";
stream.on("text", (text) => (found.streamed += text));
const final = await stream.finalMessage();
found.final = final.content[0].text;
found.streamed_tokens = final.usage.output_tokens;

found.counted = (await client.messages.countTokens({ model: asked.model, messages })).input_tokens;

try {
  await client.messages.create({ ...request, max_tokens: -1 });
} catch (error) {
  found.error = [error instanceof Anthropic.BadRequestError, error.status, error.error.error.type];
}
console.log(JSON.stringify(found));
