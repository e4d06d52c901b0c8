// Calls Cadenza by generated stubs: streams an answer, reads an error's details, cancels, sets a deadline.
//   npm ci && npm run stubs && node generate.js [HOST:PORT] [PROMPT]
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";

import { GenerationService } from "./gen/cadenza/v1/generation_pb.js";
import { BadRequestSchema } from "./gen/google/rpc/error_details_pb.js";

const [target = "127.0.0.1:50051", prompt = "What is 27 + 48?"] = process.argv.slice(2);
const baseUrl = `http://${target}`;
const sessionManager = new Http2SessionManager(baseUrl, { pingIntervalMs: 60_000 }); // pings are off by default
const client = createClient(GenerationService, createGrpcTransport({ baseUrl, sessionManager }));

// A chat of one message, answered greedily. A field that is not set takes the server's default.
const request = (samplingParams) => ({
  prompt: [{ part: { case: "chat", value: { messages: [{ role: "user", content: prompt }] } } }],
  samplingParams: { temperature: 0, maxTokens: 64, ...samplingParams },
});
const endless = request({ maxTokens: 1000, ignoreEos: true });

for await (const { outputs } of client.generate(request()))
  process.stdout.write(outputs.map(({ text }) => text).join(""));
process.stdout.write("\n");

// The details of an error are google.rpc messages; a wrong field is refused with its path.
try {
  for await (const _ of client.generate(request({ topP: 2 })));
} catch (error) {
  const { code } = ConnectError.from(error);
  for (const { fieldViolations } of error.findDetails(BadRequestSchema))
    for (const { field, description } of fieldViolations) console.log(`[${Code[code]}] ${field}: ${description}`);
}

// Leaving the loop cancels the call, and the server frees what the request held. So does a signal, from anywhere.
for await (const _ of client.generate(endless)) break;
const controller = new AbortController();
try {
  for await (const _ of client.generate(endless, { signal: controller.signal })) controller.abort();
} catch (error) {
  console.log(`[${Code[error.code]}]`);
}

try {
  for await (const _ of client.generate(endless, { timeoutMs: 50 }));
} catch (error) {
  console.log(`[${Code[error.code]}]`);
}

sessionManager.abort(); // closes the connection, which would keep the program running
