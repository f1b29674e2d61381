// What the tests of all clients for Node.js ask for; samples.py in JavaScript. Bounded, so that a model that writes
// nonsense comes to an end.
import { z } from "zod";

export const { what, base, model, prompt } = JSON.parse(process.argv[2]);
export const apiKey = "no-secret";

export const Person = z.object({
  name: z.string().max(12),
  age: z.number().int().min(0).max(150),
  drinks: z.enum(["tea", "coffee"]),
  likes: z.array(z.enum(["cats", "dogs"])).max(2),
});
export const City = z.object({ city: z.string().max(12) });

/** Run the function of the argument `what` and print its result as JSON. */
export async function main(functions) {
  console.log(JSON.stringify(await functions[what]()));
}
