//! Statistics of disjoint sequences to their sum.

use wush_stats::Statistics;

use crate::Result;
use crate::calibrate::calibration_of;
use crate::error::InStage;
use crate::paths::NewFile;
use crate::report::{MergeReport, WrittenFile};
use crate::request::{Environment, MergeRequest};

/// `wush merge`: statistics files, in the order given, to one.
///
/// # Errors
/// `OutputExists`; files of other models or settings, or a sequence twice.
pub fn merge(request: &MergeRequest, env: &Environment<'_>) -> Result<MergeReport> {
    let out = NewFile::plan(&request.out)?;
    let mut parts = Vec::with_capacity(request.inputs.len());
    env.monitor.begin("merge", "files", request.inputs.len() as u64);
    for path in &request.inputs {
        parts.push(Statistics::load(path)?);
        env.monitor.advance(1);
    }
    env.monitor.end();
    let merged = Statistics::merge(parts).in_stage("merge")?;
    let written = merged.save(&out.path)?;
    Ok(MergeReport {
        model_id: merged.info.model_id.clone(),
        calibration: calibration_of(&merged.info),
        inputs: request.inputs.len() as u64,
        out: WrittenFile::new(&out.path, written),
    })
}
