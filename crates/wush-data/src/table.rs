//! The text column of a parquet file, row group by row group. Enters: a path and a column's name. Leaves: one text at
//! a time. Other columns are not read. The parquet crate panics on some files that are none: that is an error of the file here.

use std::path::{Path, PathBuf};

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, RecordBatch};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use wush_format::guard;
use wush_format::json::open_regular;

use crate::documents::{check_length, is_blank};
use crate::{DataError, Result};

/// Rows decoded at once: bounds memory to one document and one page. More would be no faster to speak of, and a column whose rows
/// all name one long text of a dictionary grows by that text a row.
const BATCH_ROWS: usize = 1;

/// A parquet file's text column.
pub(crate) struct Table {
    path: PathBuf,
    field: String,
    batches: ParquetRecordBatchReader,
    column: Option<ArrayRef>,
    row: usize,
}

impl Table {
    pub(crate) fn open(path: &Path, field: &str) -> Result<Self> {
        guarded(path, || Self::open_unguarded(path, field))
    }

    fn open_unguarded(path: &Path, field: &str) -> Result<Self> {
        let file = open_regular(path)?;
        let unreadable = |e: parquet::errors::ParquetError| parquet_error(path, &e);
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(unreadable)?;
        let Some(index) = builder.schema().fields().iter().position(|column| column.name() == field) else {
            let columns = builder.schema().fields().iter();
            let available: Vec<String> =
                columns.map(|column| format!("{} ({})", column.name(), column.data_type())).collect();
            return Err(DataError::NoField {
                path: path.to_owned(),
                place: "the table".to_owned(),
                field: field.to_owned(),
                available: available.join(", "),
            });
        };
        let mask = ProjectionMask::roots(builder.parquet_schema(), [index]);
        let batches = builder.with_projection(mask).with_batch_size(BATCH_ROWS).build().map_err(unreadable)?;
        Ok(Self { path: path.to_owned(), field: field.to_owned(), batches, column: None, row: 0 })
    }

    /// The next text that is not blank; a null is blank.
    pub(crate) fn next(&mut self) -> Result<Option<String>> {
        loop {
            while let Some(column) = self.column.as_ref().filter(|column| self.row < column.len()) {
                let row = self.row;
                self.row += 1;
                let text = text_at(column.as_ref(), row).ok_or_else(|| self.not_text(column.as_ref()))?;
                check_length(text.len(), &self.path, || "the table".to_owned())?;
                if !is_blank(text) {
                    return Ok(Some(text.to_owned()));
                }
            }
            let Some(batch) = guarded(&self.path, || Ok(self.batches.next()))? else { return Ok(None) };
            let batch: RecordBatch = batch.map_err(|e| parquet_error(&self.path, &e))?;
            self.column = batch.columns().first().cloned();
            self.row = 0;
        }
    }

    fn not_text(&self, column: &dyn Array) -> DataError {
        DataError::NotText {
            path: self.path.clone(),
            place: "the table".to_owned(),
            field: self.field.clone(),
            found: column.data_type().to_string(),
        }
    }
}

/// The text in a row, of the string types that parquet files hold; "" for a null, `None` for any other type.
fn text_at(column: &dyn Array, row: usize) -> Option<&str> {
    if column.is_null(row) {
        return Some("");
    }
    if let Some(dictionary) = column.as_any_dictionary_opt() {
        let key = *dictionary.normalized_keys().get(row)?;
        return text_at(dictionary.values().as_ref(), key);
    }
    let small = column.as_string_opt::<i32>().map(|texts| texts.value(row));
    let large = || column.as_string_opt::<i64>().map(|texts| texts.value(row));
    let view = || column.as_string_view_opt().map(|texts| texts.value(row));
    small.or_else(large).or_else(view)
}

/// Runs a part of the parquet crate.
fn guarded<T>(path: &Path, work: impl FnOnce() -> Result<T>) -> Result<T> {
    guard::guarded(work).unwrap_or_else(|_| Err(parquet_error(path, &"the parquet library cannot handle it")))
}

fn parquet_error(path: &Path, detail: &dyn std::fmt::Display) -> DataError {
    DataError::Parquet { path: path.to_owned(), detail: detail.to_string() }
}
