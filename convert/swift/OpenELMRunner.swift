// Runs a package of `openelm convert coreml` (its default form: functions `prefill` and `decode`)
// and streams text. Needs iOS 18 / macOS 15 and swift-transformers' `Tokenizers`. MIT licence.
// Written on Linux and not compiled there: openelm-mlx's macOS job compiles and runs it.

import CoreML
import Foundation
import Tokenizers

public enum OpenELMError: Error, Equatable {
    case emptyPrompt, contextFull(tokens: Int, context: Int), badPackage(String)
}

/// The bundle's `generation.json`.
public struct OpenELMSettings: Decodable, Sendable {
    public let context, prefill: Int
    public let eosTokenIds: [Int]
    public var chat: Bool
    public var stop: [String]
    public var temperature, topP, repetitionPenalty: Float  // temperature 0 is greedy
}

@available(iOS 18.0, macOS 15.0, visionOS 2.0, tvOS 18.0, watchOS 11.0, *)
public actor OpenELMRunner {
    public var settings: OpenELMSettings
    public private(set) var tokens: [Int] = []  // in the cache, in order
    public let tokenizer: any Tokenizer
    private let prefill, decode: MLModel
    private let state: MLState  // one for both functions

    /// - Parameters:
    ///   - model: the compiled package (`.mlmodelc`), or the `.mlpackage`, compiled here.
    ///   - bundle: the folder that was written beside the package.
    public init(model: URL, bundle: URL, computeUnits: MLComputeUnits = .cpuAndGPU) async throws {
        let compiled =
            try await model.pathExtension == "mlpackage" ? MLModel.compileModel(at: model) : model
        func load(_ function: String) throws -> MLModel {
            let configuration = MLModelConfiguration()
            configuration.functionName = function
            configuration.computeUnits = computeUnits
            return try MLModel(contentsOf: compiled, configuration: configuration)
        }
        let json = JSONDecoder()
        json.keyDecodingStrategy = .convertFromSnakeCase
        let file = bundle.appendingPathComponent("generation.json")
        settings = try json.decode(OpenELMSettings.self, from: Data(contentsOf: file))
        tokenizer = try await AutoTokenizer.from(modelFolder: bundle)
        prefill = try load("prefill")
        let decoder = try load("decode")
        decode = decoder
        state = decoder.makeState()
    }

    public func update(_ change: @Sendable (inout OpenELMSettings) -> Void) { change(&settings) }

    /// Continues a text; with a model that chats, answers it as a user's message.
    public func generate(_ prompt: String, maxTokens: Int = 256) throws -> AsyncThrowingStream<String, Error> {
        let ids = try settings.chat && tokenizer.hasChatTemplate
            ? tokenizer.applyChatTemplate(messages: [["role": "user", "content": prompt]])
            : tokenizer.encode(text: prompt)
        return generate(ids: ids, maxTokens: maxTokens)
    }

    /// Continues token ids, BOS included. Of a conversation, only what is new is computed.
    public func generate(ids: [Int], maxTokens: Int = 256) -> AsyncThrowingStream<String, Error> {
        AsyncThrowingStream { continuation in
            let task = Task {
                do {
                    try await self.run(ids, maxTokens) { continuation.yield($0) }
                    continuation.finish()
                } catch { continuation.finish(throwing: error) }
            }
            continuation.onTermination = { _ in task.cancel() }
        }
    }

    private func run(_ ids: [Int], _ maxTokens: Int, _ emit: @Sendable (String) -> Void) async throws {
        var text = TextStream(tokenizer: tokenizer, stop: settings.stop)
        var seen = ids
        var logits = try feed(all: ids)
        for count in 1...max(1, maxTokens) {
            let token = Self.pick(logits, seen, settings)
            if settings.eosTokenIds.contains(token) { break }
            seen.append(token)
            emit(text.add(token))
            if text.stopped || count == maxTokens || Task.isCancelled { break }
            if seen.count > settings.context { emit(text.finish()) }  // and `feed` throws
            logits = try feed(all: seen)
            await Task.yield()
        }
        emit(text.finish())
    }

    /// Makes the cache hold exactly `ids` and returns the logits after the last of them. What the
    /// cache shares with them from the start is not computed again.
    public func feed(all ids: [Int]) throws -> [Float] {
        let (context, n) = (settings.context, settings.prefill)
        guard let last = ids.indices.last else { throw OpenELMError.emptyPrompt }
        if ids.count > context { throw OpenELMError.contextFull(tokens: ids.count, context: context) }
        var at = min(zip(tokens, ids).prefix { $0 == $1 }.count, last)
        tokens.removeSubrange(at...)
        while at < last {  // all but the last token, n at a time
            let first = min(at, context - n)  // near the end: some tokens once more
            let chunk = Array(ids[first..<min(first + n, last)])
            let pads = [Int](repeating: 0, count: n - chunk.count)  // overwritten before they are read
            _ = try predict(prefill, chunk + pads, first)
            at = first + chunk.count
            tokens = Array(ids[..<at])
        }
        let logits = try predict(decode, [ids[last]], last)
        tokens = ids
        return logits
    }

    private func predict(_ model: MLModel, _ ids: [Int], _ position: Int) throws -> [Float] {
        let inputs = try MLDictionaryFeatureProvider(dictionary: [
            "inputIds": Self.feature(ids, [1, ids.count]), "position": Self.feature([position], [1]),
        ])
        let outputs = try model.prediction(from: inputs, using: state)
        guard let logits = outputs.featureValue(for: "logits")?.multiArrayValue else {
            throw OpenELMError.badPackage("no output named logits")
        }
        return Array(MLShapedArray<Float>(converting: logits).scalars.suffix(logits.shape[2].intValue))
    }

    private static func feature(_ values: [Int], _ shape: [Int]) -> MLFeatureValue {
        let array = MLShapedArray<Int32>(scalars: values.map { Int32($0) }, shape: shape)
        return MLFeatureValue(multiArray: MLMultiArray(array))
    }

    /// Greedy, or drawn from the likeliest tokens that together reach `topP`.
    private static func pick(_ logits: [Float], _ seen: [Int], _ settings: OpenELMSettings) -> Int {
        var scores = logits
        for token in Set(seen) where settings.repetitionPenalty != 1 && token < scores.count {
            scores[token] *= scores[token] < 0 ? settings.repetitionPenalty : 1 / settings.repetitionPenalty
        }
        let best = scores.indices.max { scores[$0] < scores[$1] } ?? 0
        if settings.temperature <= 0 { return best }
        let weights = scores.map { expf($0 - scores[best]) }
        let total = weights.reduce(0, +)
        var (kept, mass): ([Int], Float) = ([], 0)
        for token in weights.indices.sorted(by: { weights[$0] > weights[$1] }) {
            kept.append(token)
            mass += weights[token] / total
            if mass >= settings.topP { break }
        }
        let odds = kept.map { expf((scores[$0] - scores[best]) / settings.temperature) }
        var left = Float.random(in: 0..<odds.reduce(0, +))
        for (token, odd) in zip(kept, odds) {
            left -= odd
            if left < 0 { return token }
        }
        return best
    }
}

/// Ids to text that is never taken back: half a character and what may begin a stop text are held.
private struct TextStream {
    let tokenizer: any Tokenizer
    let stop: [String]
    private(set) var stopped = false
    private var shown: [Int] = [], fresh: [Int] = []  // a window of ids: settled, and not yet
    private var held = ""

    init(tokenizer: any Tokenizer, stop: [String]) { self.tokenizer = tokenizer; self.stop = stop }

    mutating func add(_ token: Int) -> String {
        fresh.append(token)
        let text = decode(shown + fresh)
        if text.unicodeScalars.last == "\u{FFFD}" && fresh.count < 16 { return "" }
        return settle(text)
    }

    mutating func finish() -> String {
        let text = fresh.isEmpty ? "" : settle(decode(shown + fresh))
        return text + (stopped ? "" : held)
    }

    private mutating func settle(_ text: String) -> String {
        let before = decode(shown)
        held += text.hasPrefix(before)  // a bad byte spoils those before it: then `fresh` stands alone
            ? String(String.UnicodeScalarView(text.unicodeScalars.dropFirst(before.unicodeScalars.count)))
            : decode(fresh)
        (shown, fresh) = (fresh, [])
        if let end = stop.compactMap({ held.range(of: $0)?.lowerBound }).min() {
            stopped = true
            return String(held[..<end])
        }
        let keep = stop.map { s in (0..<s.count).last { held.hasSuffix(s.prefix($0)) } ?? 0 }.max() ?? 0
        defer { held = String(held.suffix(keep)) }
        return String(held.dropLast(keep))
    }

    /// The end token goes along: without it, some versions drop bytes at the end.
    private func decode(_ ids: [Int]) -> String {
        let text = tokenizer.decode(tokens: ids + [tokenizer.eosTokenId].compactMap { $0 })
        let end = tokenizer.eosToken ?? ""
        return text.hasSuffix(end) ? String(text.dropLast(end.count)) : text
    }
}
