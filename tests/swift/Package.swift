// swift-tools-version: 5.9
// The workflow's check of OpenELMRunner.swift with the real swift-transformers: not part of the
// Python packages. The runner itself is copied into Sources/RunnerCheck from a bundle.

import PackageDescription

let package = Package(
    name: "RunnerCheck",
    platforms: [.macOS("15.0")],
    dependencies: [
        .package(url: "https://github.com/huggingface/swift-transformers", from: "1.0.0")
    ],
    targets: [
        .executableTarget(
            name: "RunnerCheck",
            dependencies: [.product(name: "Transformers", package: "swift-transformers")])
    ]
)
