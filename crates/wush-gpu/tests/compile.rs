//! Every kernel compiles for every architecture that it claims, with the compiler alone: no GPU is needed.

mod common;

use wush_gpu::compiler::{Job, Target, version};
use wush_gpu::kernels::{EVERYWHERE, KERNELS};

/// Macros of a variant, as a job takes them.
fn owned<'a>(variant: &[(&'a str, &str)]) -> Vec<(&'a str, String)> {
    variant.iter().map(|(name, value)| (*name, (*value).to_owned())).collect()
}

#[test]
fn every_kernel_compiles_for_every_architecture_that_it_claims() {
    if let Err(why) = version() {
        return common::skipped("every_kernel_compiles_for_every_architecture_that_it_claims", &why.to_string());
    }
    let mut failures = Vec::new();
    for file in KERNELS {
        for architecture in file.runs_on {
            let target = Target::Machine(architecture.name().to_owned());
            for variant in file.variants {
                let macros = owned(variant);
                let job = Job { kernel: file.name, source: file.source, target: &target, macros: &macros };
                failures.extend(job.compile().err().map(|error| format!("{macros:?}: {error}")));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
fn the_shared_helpers_compile_everywhere() {
    if let Err(why) = version() {
        return common::skipped("the_shared_helpers_compile_everywhere", &why.to_string());
    }
    let source = "#include \"common.cuh\"\nextern \"C\" __global__ void nothing() {}\n";
    for architecture in EVERYWHERE {
        let target = Target::Machine(architecture.name().to_owned());
        let code = Job { kernel: "common", source, target: &target, macros: &[] }.compile().expect("it compiles");
        assert!(code.starts_with(b"\x7fELF"), "machine code for {}", architecture.name());
    }
}

#[test]
fn what_does_not_compile_says_why() {
    if let Err(why) = version() {
        return common::skipped("what_does_not_compile_says_why", &why.to_string());
    }
    let target = Target::Machine("sm_80".to_owned());
    let job = Job { kernel: "broken", source: "__global__ void f() { undeclared; }", target: &target, macros: &[] };
    let message = job.compile().expect_err("it does not compile").to_string();
    assert!(
        message.starts_with("kernels/broken.cu: cannot compile for sm_80: ") && message.contains("undeclared"),
        "{message}"
    );
}
