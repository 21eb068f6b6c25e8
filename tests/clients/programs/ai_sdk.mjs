// The ai-sdk, by its openai provider (Responses is its default), openai-compatible and anthropic.
//
//     node ai_sdk.mjs URL MODEL PACKAGES     one line of JSON for each cell, as cells.py has it

import { createRequire } from 'node:module';
import path from 'node:path';
import { pathToFileURL } from 'node:url';

const [url, name, packages] = process.argv.slice(2);
const require = createRequire(path.join(packages, 'package.json'));
const load = (from) => import(pathToFileURL(require.resolve(from)));
const { generateText, streamText, tool, Output, stepCountIs, isStepCount } = await load('ai');
const { createOpenAI } = await load('@ai-sdk/openai');
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');
const { createAnthropic } = await load('@ai-sdk/anthropic');
const { z } = await load('zod');

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'any' });
const compatible = createOpenAICompatible({
  name: 'served', baseURL: `${url}/v1`, apiKey: 'any', supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: 'any' });
const prompt = 'What is the capital of France?';
const Place = z.object({ city: z.enum(['rome', 'paris']) });
const steps = stepCountIs ?? isStepCount;

function check(right, seen) {
  if (!right) throw new Error(`not as it should be: ${JSON.stringify(seen)}`);
}

async function said(model) {
  const { text, usage } = await generateText({
    model, prompt, temperature: 0, maxOutputTokens: 16, maxRetries: 0,
  });
  check(text.includes('Paris'), text);
  return `${usage.inputTokens} tokens in`;
}

async function streamed(model) {
  const parts = [];
  const answer = streamText({
    model, prompt, temperature: 0, maxOutputTokens: 16, maxRetries: 0,
    onError: ({ error }) => { throw error; },
  });
  for await (const part of answer.textStream) parts.push(part);
  check(parts.join('').includes('Paris'), parts);
  return `${parts.length} parts`;
}

async function called(model) {
  const seen = [];
  const weather = tool({
    description: 'The weather in a city.',
    inputSchema: Place,
    execute: async ({ city }) => { seen.push(city); return '20 degrees'; },
  });
  const { text, steps: taken } = await generateText({
    model, prompt: 'Is it warm in Paris?', tools: { weather }, temperature: 0, maxRetries: 0,
    maxOutputTokens: 60, stopWhen: steps(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' }),
  });
  check(['rome', 'paris'].includes(seen[0]) && taken.length === 2 && text, { seen, text });
  return `weather(${seen[0]}) was called, its result answered`;
}

async function decided(model) {
  const { output } = await generateText({
    model, prompt: 'Which city is warmer?', output: Output.object({ schema: Place }),
    temperature: 0, maxOutputTokens: 40, maxRetries: 0,
  });
  check(['rome', 'paris'].includes(output.city), output);
  return output;
}

const cells = {
  responses_answer: () => said(openai(name)),
  responses_stream: () => streamed(openai(name)),
  responses_tools: () => called(openai(name)),
  responses_structured: () => decided(openai(name)),
  chat_answer: () => said(compatible(name)),
  chat_stream: () => streamed(openai.chat(name)),
  chat_tools: () => called(compatible(name)),
  chat_structured: () => decided(compatible(name)),
  messages_answer: () => said(anthropic(name)),
  messages_stream: () => streamed(anthropic(name)),
  messages_tools: () => called(anthropic(name)),
};

const versions = {};
for (const each of ['ai', '@ai-sdk/openai', '@ai-sdk/openai-compatible', '@ai-sdk/anthropic']) {
  versions[each] = JSON.parse(await (await import('node:fs/promises')).readFile(
    path.join(packages, 'node_modules', each, 'package.json'))).version;
}
console.log(JSON.stringify({ packages: versions }));
for (const [cell, run] of Object.entries(cells)) {
  try {
    console.log(JSON.stringify({ cell, seen: await run() }));
  } catch (error) {
    const why = `${error.stack}\n${error.responseBody ?? ''}\n${error.cause ?? ''}`;
    console.log(JSON.stringify({ cell, error: why.slice(0, 3000) }));
  }
}
