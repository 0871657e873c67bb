//! Statistics of disjoint sequences to their sum.

use wush_stats::Statistics;

use crate::Result;
use crate::calibrate::calibration_of;
use crate::error::{InStage, STATISTICS};
use crate::notes::too_little_text;
use crate::paths::{NewFile, require_kind};
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
        require_kind(path, STATISTICS)?;
        parts.push(Statistics::load(path)?);
        env.monitor.advance(1);
    }
    env.monitor.end();
    let merged = Statistics::merge(parts).in_stage("merge")?;
    let written = WrittenFile::new(&out.path, merged.save(out.staged()).map_err(|e| out.named(e))?);
    let text = too_little_text(merged.info.positions, merged.info.head_dim);
    let notes = text.into_iter().chain(out.name_note()).collect();
    out.commit()?;
    Ok(MergeReport {
        model_id: merged.info.model_id.clone(),
        calibration: calibration_of(&merged.info),
        notes,
        inputs: request.inputs.len() as u64,
        out: written,
    })
}
