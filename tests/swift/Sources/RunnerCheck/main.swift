// RunnerCheck PACKAGE BUNDLE PROMPT: holds swift-transformers' tokenizer against the bundle's
// tokenizer_check.json, then prints 16 greedy tokens of the package as text.

import Foundation
import Tokenizers

struct Check: Decodable {
    struct Entry: Decodable {
        let text: String
        let ids: [Int]
    }
    let texts: [Entry]
}

let arguments = CommandLine.arguments
let package = URL(fileURLWithPath: arguments[1])
let bundle = URL(fileURLWithPath: arguments[2])

let data = try Data(contentsOf: bundle.appendingPathComponent("tokenizer_check.json"))
let entries = try JSONDecoder().decode(Check.self, from: data).texts
let tokenizer = try await AutoTokenizer.from(modelFolder: bundle)
var wrong = 0
for entry in entries {
    let ids = tokenizer.encode(text: entry.text)
    if ids != entry.ids {
        wrong += 1
        FileHandle.standardError.write(Data("\(entry.text): \(ids), expected \(entry.ids)\n".utf8))
    }
}

let runner = try await OpenELMRunner(model: package, bundle: bundle, computeUnits: .cpuOnly)
await runner.update {
    $0.temperature = 0
    $0.repetitionPenalty = 1
}
for try await text in try await runner.generate(arguments[3], maxTokens: 16) {
    print(text, terminator: "")
}
print()
FileHandle.standardError.write(Data("\(entries.count - wrong) of \(entries.count) texts agree\n".utf8))
exit(wrong == 0 ? 0 : 1)
