// One greedy answer, printed as it comes: node generate.js [HOST:PORT] [PROMPT]
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const [target = "127.0.0.1:50051", prompt = "What is 27 + 48?"] = process.argv.slice(2);
const reading = { includeDirs: [`${import.meta.dirname}/../../protos`], keepCase: true, longs: String, enums: String };
const { cadenza } = grpc.loadPackageDefinition(loadSync("cadenza/v1/generation.proto", reading));
const client = new cadenza.v1.GenerationService(target, grpc.credentials.createInsecure());

const chat = { messages: [{ role: "user", content: prompt }] };
const call = client.Generate({ prompt: [{ chat }], sampling_params: { temperature: 0, max_tokens: 64 } });
for await (const { outputs = [] } of call) process.stdout.write(outputs.map(({ text = "" }) => text).join(""));
process.stdout.write("\n");
