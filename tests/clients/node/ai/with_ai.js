// Asks a server with the AI SDK: generateText and streamText by its providers for OpenAI-compatible servers and for
// Anthropic's API, a completion, and an object by a schema.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText } from "ai";

const asked = JSON.parse(process.argv[2]);
const provider = createOpenAICompatible({
  name: "cadenza",
  baseURL: `${asked.url}/v1`,
  apiKey: "any",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: `${asked.url}/v1`, apiKey: "any" });
const settings = { temperature: 0, maxOutputTokens: asked.max_tokens, maxRetries: 0 };

async function both(model) {
  const whole = await generateText({ ...settings, model, prompt: asked.question });
  const stream = streamText({ ...settings, model, prompt: asked.question });
  let streamed = "";
  for await (const text of stream.textStream) streamed += text;
  const usage = await stream.usage;
  return {
    text: whole.text,
    finish: whole.finishReason,
    tokens: whole.usage.outputTokens,
    streamed,
    streamed_tokens: usage.outputTokens,
  };
}

// Without objects and lists, in which the model could write spaces until its last token.
const schema = jsonSchema({ enum: ["even", "odd"] });
const object = await generateText({
  ...settings,
  maxOutputTokens: 200,
  model: provider.chatModel(asked.model),
  prompt: asked.question,
  output: Output.object({ schema }),
}).catch((error) => ({ output: null, error: String(error) }));
const completion = await generateText({
  ...settings,
  model: provider.completionModel(asked.model),
  prompt: asked.prompt,
});
console.log(
  JSON.stringify({
    chat: await both(provider.chatModel(asked.model)),
    messages: await both(anthropic(asked.model)),
    completion: completion.text,
    object: object.output,
    object_error: object.error,
  }),
);
