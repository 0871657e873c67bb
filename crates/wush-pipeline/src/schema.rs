//! JSON Schemas of what is written and reported, made from the Rust types. `schemas/` holds them; a test fails when they drift.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use wush_format::manifest::Manifest;

use crate::bench::{BenchCalibrateReport, BenchKernelsReport};
use crate::doctor::DoctorReport;
use crate::report::{
    CalibrateReport, ConvertReport, DemoReport, EvalPplReport, EvalReconReport, ExportReport, GenerateReport,
    MergeReport, ServeReport, SolveReport, UnfoldReport,
};

/// One schema: `schemas/{name}.json`.
#[derive(Clone, Copy)]
pub struct NamedSchema {
    /// Name of the command whose report it is, or "manifest".
    pub name: &'static str,
    make: fn(SchemaGenerator) -> Schema,
}

/// Every schema, sorted by name.
pub const SCHEMAS: &[NamedSchema] = &[
    NamedSchema { name: "bench-calibrate", make: make::<BenchCalibrateReport> },
    NamedSchema { name: "bench-kernels", make: make::<BenchKernelsReport> },
    NamedSchema { name: "calibrate", make: make::<CalibrateReport> },
    NamedSchema { name: "convert", make: make::<ConvertReport> },
    NamedSchema { name: "demo", make: make::<DemoReport> },
    NamedSchema { name: "doctor", make: make::<DoctorReport> },
    NamedSchema { name: "eval-ppl", make: make::<EvalPplReport> },
    NamedSchema { name: "eval-recon", make: make::<EvalReconReport> },
    NamedSchema { name: "export", make: make::<ExportReport> },
    NamedSchema { name: "fold", make: make::<ConvertReport> },
    NamedSchema { name: "generate", make: make::<GenerateReport> },
    NamedSchema { name: "inspect", make: make::<wush_inspect::Report> },
    NamedSchema { name: "manifest", make: make::<Manifest> },
    NamedSchema { name: "merge", make: make::<MergeReport> },
    NamedSchema { name: "serve", make: make::<ServeReport> },
    NamedSchema { name: "solve", make: make::<SolveReport> },
    NamedSchema { name: "unfold", make: make::<UnfoldReport> },
];

impl NamedSchema {
    /// The schema as pretty JSON with a final newline.
    pub fn text(&self) -> String {
        let schema = (self.make)(SchemaGenerator::default());
        let text = serde_json::to_string_pretty(schema.as_value()).expect("a JSON value can be written");
        text + "\n"
    }
}

/// The schema of this name.
pub fn find(name: &str) -> Option<&'static NamedSchema> {
    SCHEMAS.iter().find(|schema| schema.name == name)
}

/// All names.
pub fn names() -> Vec<&'static str> {
    SCHEMAS.iter().map(|schema| schema.name).collect()
}

fn make<T: JsonSchema>(generator: SchemaGenerator) -> Schema {
    generator.into_root_schema_for::<T>()
}
