// Asks a server with OpenAI's SDK: models, completions, chats and responses, whole and streamed, and an error.
import OpenAI from "openai";

const asked = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: `${asked.url}/v1`, apiKey: "any", maxRetries: 0 });
const chat = {
  model: asked.model,
  messages: [{ role: "user", content: asked.question }],
  temperature: 0,
  max_completion_tokens: asked.max_tokens,
};
const response = { model: asked.model, input: asked.question, temperature: 0, max_output_tokens: asked.max_tokens };
const found = { models: [] };

for await (const model of client.models.list()) found.models.push(model.id);

const whole = await client.chat.completions.create(chat);
found.chat = whole.choices[0].message.content;
found.tokens = whole.usage.completion_tokens;

found.streamed = "";
for await (const chunk of await client.chat.completions.create({
  ...chat,
  stream: true,
  stream_options: { include_usage: true },
})) {
  found.streamed += chunk.choices[0]?.delta.content ?? "";
  if (chunk.usage) found.streamed_tokens = chunk.usage.completion_tokens;
}

const runner = client.chat.completions.stream(chat);
found.helper = (await runner.finalChatCompletion()).choices[0].message.content;

const completion = { model: asked.model, prompt: asked.prompt, temperature: 0, max_tokens: asked.max_tokens };
found.completion = (await client.completions.create(completion)).choices[0].text;

const answer = await client.responses.create({ ...response, store: true, metadata: { name: "value" } });
found.response = answer.output_text;
found.metadata = answer.metadata;

found.response_streamed = "";
for await (const event of await client.responses.create({ ...response, stream: true })) {
  if (event.type === "response.output_text.delta") found.response_streamed += event.delta;
}
found.response_helper = (await client.responses.stream(response).finalResponse()).output_text;

try {
  await client.chat.completions.create({ ...chat, model: "none" });
} catch (error) {
  found.error = [error instanceof OpenAI.NotFoundError, error.status, error.code, error.param];
}
console.log(JSON.stringify(found));
