//! One view of a model file, whether `.myq` or GGUF.

use myq_blocks::Layout;
use myq_format::{Kind, TensorInfo, gguf::Gguf, myq::Myq, sniff};

use crate::rope::RopeTable;
use crate::template::{ChatTemplate, Message, TemplateError};
use crate::tokenizer::{Tokenizer, encode_prompt};
use crate::{Config, ModelError, Weights};

/// Everything that running a model needs, apart from the bytes of its matrices.
#[derive(Debug)]
pub struct Source {
    /// Which container it was.
    pub kind: Kind,
    /// Sizes and constants.
    pub config: Config,
    /// Where each matrix lies.
    pub weights: Weights,
    /// Angles of the position embedding.
    pub rope: RopeTable,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// The model's own chat template, as Jinja source.
    pub chat_template: Option<String>,
    /// The tensor table, in the file's order.
    pub tensors: Vec<TensorInfo>,
    /// How the file stores matrices that can be stored so.
    pub layout: Layout,
}

impl Source {
    /// Reads and checks a whole file; `file` must stay as it is while the model is used.
    pub fn open(file: &[u8]) -> Result<Source, ModelError> {
        match sniff(file).ok_or(ModelError::Signature)? {
            Kind::Gguf => {
                let g = Gguf::parse(file)?;
                let tokenizer = Tokenizer::from_gguf(&g)?;
                let template = g.str("tokenizer.chat_template").map(str::to_owned);
                Source::assemble(
                    Kind::Gguf,
                    Config::from_gguf(&g)?,
                    tokenizer,
                    template,
                    g.tensors(),
                    Layout::Plain,
                    file,
                )
            }
            Kind::Myq => {
                let m = Myq::parse(file)?;
                m.verify_tokenizer()?;
                let config: Config =
                    serde_json::from_value(m.header().config.clone()).map_err(|e| {
                        ModelError::Config(format!(
                            "the file's configuration: {e}; import the model again"
                        ))
                    })?;
                config.check()?;
                let tokenizer = Tokenizer::from_bytes(m.tokenizer())?;
                Source::assemble(
                    Kind::Myq,
                    config,
                    tokenizer,
                    m.header().chat_template.clone(),
                    m.tensors(),
                    m.layout(),
                    file,
                )
            }
        }
    }

    fn assemble(
        kind: Kind,
        config: Config,
        tokenizer: Tokenizer,
        chat_template: Option<String>,
        tensors: &[TensorInfo],
        layout: Layout,
        file: &[u8],
    ) -> Result<Source, ModelError> {
        config.check_tokenizer(tokenizer.vocab_size())?;
        let weights = Weights::find(&config, tensors, layout, file)?;
        let rope = RopeTable::new(&config, weights.rope_factors.as_deref());
        Ok(Source {
            kind,
            config,
            weights,
            rope,
            tokenizer,
            chat_template,
            tensors: tensors.to_vec(),
            layout,
        })
    }

    /// The model's own chat template, compiled; `None` where it has none.
    pub fn template(&self) -> Result<Option<ChatTemplate>, ModelError> {
        let Some(text) = &self.chat_template else {
            return Ok(None);
        };
        Ok(Some(compile(text, &self.tokenizer)?))
    }

    /// Tokens of a conversation that the model is to answer.
    pub fn chat_tokens(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
    ) -> Result<Vec<u32>, ModelError> {
        Ok(encode_prompt(
            &self.tokenizer,
            &template.render(messages, true)?,
            true,
        ))
    }
}

/// A chat template with the marks of this tokenizer.
///
/// # Errors
/// A template that is not well-formed.
pub fn compile(template: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate, TemplateError> {
    let name = |id: Option<u32>| {
        let bytes = id.map_or(&[][..], |id| tokenizer.token_bytes(id));
        String::from_utf8_lossy(bytes).into_owned()
    };
    let (bos, eos) = (tokenizer.bos(), tokenizer.eos_ids().first().copied());
    ChatTemplate::new(template, &name(bos), &name(eos))
}
